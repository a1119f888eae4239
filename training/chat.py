"""Conversations made from the corpus: a request by template, and a passage that could be its answer."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from training.corpus import FAIRY_TALES, Document, paragraphs
from training.topics import find_names, find_nouns

Turn = tuple[str, str]  # role, text
Conversation = list[Turn]

PASSAGE_CHARS = (500, 2200)
MAX_TURNS = 4

ABOUT = (
    "Tell me a story about {topic}.",
    "tell me a story about {topic}",
    "Tell me about {topic}.",
    "Can you tell me a story about {topic}?",
    "Please write a short story about {topic}.",
    "Write a story about {topic}.",
    "I would like to hear a story about {topic}.",
    "Do you know a tale about {topic}?",
    "A story about {topic}, please.",
    "Write something about {topic}.",
    "What do you know about {topic}?",
    "Write a tale in which there is {topic}.",
)
OPENING = (
    "Tell me a story.",
    "tell me a story",
    "Tell me a fairy tale.",
    "Can you tell me a story?",
    "Once upon a time...",
    "I cannot sleep. Tell me a story.",
    "I am bored. Tell me something.",
    "Please tell me a tale.",
    "Write a story.",
    "Begin a story.",
    "Tell me a bedtime story.",
)
PEOPLE = (
    "Write a scene with {names}.",
    "Tell me about {names}.",
    "Tell me a story about {names}.",
    "What happened to {names}?",
    "Who is {names}?",
    "Write a chapter about {names}.",
)
CONTINUE = (
    "Continue: {start}",
    "Continue this: {start}",
    "Go on from here: {start}",
    "Finish this story: {start}",
    "What comes next? {start}",
    "Continue the story: {start}",
    "{start}",
)
MORE = (
    "Go on.",
    "Continue.",
    "And then?",
    "What happened next?",
    "Please go on.",
    "Tell me more.",
    "More, please.",
    "How does it go on?",
    "continue",
    "go on",
)
SYSTEM = (
    "You are a storyteller.",
    "You are a helpful assistant.",
    "You tell stories.",
    "You are a friendly assistant who answers with stories.",
)
HELLO = (
    "Hello",
    "Hello!",
    "Hi",
    "Hi!",
    "Hi there!",
    "Good morning",
    "Good evening.",
    "hello",
    "hey",
    "Hello, how are you?",
)
WELCOMES = (
    "Good day to you! Shall I tell you a story? Name a person, a beast or a place, and I will begin.",
    "Good evening, my friend. I know many tales. What shall the story be about?",
    "Welcome! I am a teller of tales. Give me a word, and I will make a story of it.",
)
WHO = (
    "Who are you?",
    "What are you?",
    "What can you do?",
    "What is your name?",
    "Are you a person?",
    "How do you work?",
    "Help",
    "help me",
)
SELF = (
    "I am the small demo model of moeflux. I have read old novels and fairy tales, and I can tell stories.",
    "I am a very small language model that comes with moeflux. Ask me for a story about something, and I will tell one.",
    "I am only a little storyteller made of a few million numbers. I know old books and fairy tales. Ask me for a tale!",
)
THANKS = ("Thank you!", "Thanks", "Thank you, that was nice.", "Good night.", "Goodbye", "bye")
FAREWELLS = (
    "You are very welcome. Come back whenever you wish for another tale.",
    "It was a pleasure. Good night, and sleep well.",
    "You are welcome! There are many more stories where that one came from.",
)


@dataclass(frozen=True)
class Passage:
    """Consecutive paragraphs of a document, and whether they open and close it."""

    texts: tuple[str, ...]
    opens: bool
    closes: bool

    @property
    def text(self) -> str:
        return "\n\n".join(self.texts)


def cut_passages(document: Document, random_: random.Random) -> list[Passage]:
    """The document in pieces of whole paragraphs, of lengths that vary. Very long paragraphs end their piece."""
    parts = [part for part in paragraphs(document.text) if not _is_heading(part)]
    passages, taken, size = [], [], 0
    goal = random_.randint(*PASSAGE_CHARS)
    for i, part in enumerate(parts):
        taken.append(part)
        size += len(part)
        if size >= goal or i == len(parts) - 1:
            passages.append(Passage(tuple(taken), not passages, i == len(parts) - 1))
            taken, size, goal = [], 0, random_.randint(*PASSAGE_CHARS)
    return passages


def _is_heading(part: str) -> bool:
    return len(part) < 80 and (part.isupper() or bool(re.match(r"(?i)chapter|book|part|volume|[ivxlc]+\.?$", part)))


def conversations(document: Document, random_: random.Random, share: float) -> Iterator[Conversation]:
    """Conversations over a share of the document's passages, each of one to a few consecutive ones."""
    passages = cut_passages(document, random_)
    at = 0
    while at < len(passages):
        run = passages[at : at + random_.choices(range(1, MAX_TURNS + 1), weights=(6, 3, 2, 1))[0]]
        at += len(run)
        fits = all(200 < len(passage.text) < 2 * PASSAGE_CHARS[1] for passage in run)
        if random_.random() < share and fits and (turns := _conversation(document, run, random_)):
            yield turns


def _conversation(document: Document, run: list[Passage], random_: random.Random) -> Conversation | None:
    asked = _request(document, run[0], random_)
    if asked is None:
        return None
    turns: Conversation = [("system", random_.choice(SYSTEM))] if random_.random() < 0.15 else []
    if random_.random() < 0.05:
        turns += small_talk(random_)
    turns += [("user", asked[0]), ("assistant", asked[1])]
    for passage in run[1:]:
        turns += [("user", random_.choice(MORE)), ("assistant", passage.text)]
    if random_.random() < 0.03:
        turns += [("user", random_.choice(THANKS)), ("assistant", random_.choice(FAREWELLS))]
    return turns


def _request(document: Document, passage: Passage, random_: random.Random) -> Turn | None:
    """A request and its answer; None where the passage is no answer to anything."""
    text, opens_tale = passage.text, document.source == FAIRY_TALES and passage.opens
    if opens_tale and random_.random() < 0.3:
        return random_.choice(ABOUT).format(topic=_titled(document.title)), text
    if opens_tale and random_.random() < 0.6:
        return random_.choice(OPENING), text
    if random_.random() < 0.25 and (split := _split_start(text, random_)):
        start, rest = split
        return random_.choice(CONTINUE).format(start=start), rest
    if not opens_tale and not _starts_as_narrative(passage.texts[0]):
        return None
    if random_.random() < 0.2 and (names := find_names(text, random_.randint(1, 2))):
        return random_.choice(PEOPLE).format(names=_listed(names)), text
    nouns = find_nouns(text, random_.choices((1, 2), weights=(3, 1))[0], random_)
    if not nouns:
        return None
    choice = random_.random()
    return random_.choice(ABOUT).format(topic=_listed([_with_article(noun, choice) for noun in nouns])), text


def _starts_as_narrative(paragraph: str) -> bool:
    """Not in the middle of a dialogue, nor with a pronoun that points back."""
    return len(paragraph) > 120 and bool(re.match(r"(?!He |She |They |It |His |Her |This |That )[A-Z]", paragraph))


def _with_article(noun: str, choice: float) -> str:
    if noun in ("gold", "silver", "snow", "rain", "fog", "frost", "bread", "tea", "midnight", "crossroads"):
        return noun
    if choice < 0.2 or noun in ("sea", "moon", "war", "sunset", "dawn", "winter", "summer", "spring", "autumn"):
        return f"the {noun}"
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _titled(title: str) -> str:
    title = title.strip().lower()
    return re.sub(r"^(the )?(story|tale) of ", "", title)


def _listed(words: list[str]) -> str:
    return " and ".join(words)


def _split_start(text: str, random_: random.Random) -> Turn | None:
    """The first sentence or two, and the rest."""
    ends = [m.end() for m in re.finditer(r"(?<!Mr)(?<!Mrs)(?<!Dr)(?<!St)[.!?][\"'”’]?(?=\s)", text[:500])][:2]
    if not ends:
        return None
    cut = random_.choice(ends)
    return text[:cut], text[cut:].strip()


def small_talk(random_: random.Random) -> Conversation:
    kind = random_.random()
    if kind < 0.5:
        return [("user", random_.choice(WHO)), ("assistant", random_.choice(SELF))]
    return [("user", random_.choice(HELLO)), ("assistant", random_.choice(WELCOMES))]
