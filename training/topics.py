"""What a passage is about: names that recur, and things from a list of what stories are asked about."""

import random
import re
from collections import Counter

START_CHARS = 500  # where the topic of a passage must stand, so that an answer comes to it at once

_PEOPLE = """king queen prince princess giant dwarf witch wizard fairy mermaid troll ogre goblin ghost angel devil knight
soldier sailor captain pirate robber thief beggar miller tailor shoemaker blacksmith carpenter fisherman hunter shepherd
farmer gardener cook servant maid nurse governess teacher schoolmaster doctor lawyer judge clerk merchant banker priest
bishop clergyman curate monk nun hermit poet painter musician fiddler actress gipsy stranger traveller widow orphan
bride bridegroom bachelor spinster grandmother grandfather godmother stepmother uncle aunt nephew niece twin baby child
boy girl duke duchess earl baron squire emperor sultan peasant woodcutter swineherd detective policeman murderer"""
_ANIMALS = """fox wolf bear lion tiger elephant monkey dog puppy cat kitten mouse rat rabbit hare horse pony donkey ass ox
cow calf bull goat sheep lamb ram pig boar deer stag hen cock rooster duck goose swan eagle hawk owl raven crow dove pigeon
sparrow swallow nightingale lark robin peacock parrot stork frog toad snake serpent dragon tortoise fish salmon whale
shark crab bee wasp ant spider fly butterfly beetle worm bird beast monster unicorn hedgehog badger squirrel otter seal"""
_PLACES = """castle palace tower cottage hut inn church chapel abbey cathedral churchyard graveyard school prison mill farm
farmhouse barn stable kitchen library garden orchard meadow field forest wood wilderness mountain hill valley cave island
river lake pond brook fountain waterfall sea ocean shore beach harbour village town city market theatre hospital
desert jungle moor heath cliff bridge road lane crossroads railway station parsonage vicarage rectory manor attic cellar"""
_THINGS = """ring crown sword dagger pistol gun lamp lantern candle mirror necklace diamond pearl ruby jewel treasure gold
silver coin purse letter book diary map key locket portrait picture statue clock violin fiddle flute harp piano drum
bell cloak slipper shoe boot hat dress shawl fan umbrella basket axe spindle needle plough cart carriage coach train ship
boat raft balloon wheel pot kettle cake bread apple pear cherry nut lily tree oak willow flower seed feather egg
dream secret riddle curse spell quarrel duel wedding funeral ball dance feast picnic storm thunderstorm snow
rain fog frost winter summer spring autumn moon star sunset dawn midnight fire shipwreck journey voyage war battle murder
inheritance debt fever illness birthday holiday dinner tea supper breakfast"""
NOUNS = frozenset(f"{_PEOPLE} {_ANIMALS} {_PLACES} {_THINGS}".split())

_PHRASE = re.compile(r"\b(?:[Aa]n?|[Tt]he|[Hh]is|[Hh]er|[Mm]y|[Tt]heir|[Oo]ur|[Tt]wo|[Tt]hree) (?=([a-z]+)(?: ([a-z]+))?)")
_NAME = re.compile(r"(?<=[a-z,;] )([A-Z][a-z]{2,11})\b")
_TITLES = """The And But God Lord Lady Sir Miss Mrs Majesty Heaven King Queen Prince Princess English England London
French Christmas Sunday Monday Tuesday Wednesday Thursday Friday Saturday January February March April May June July
August September October November December Captain Doctor Madam Master Mister Aunt Uncle Father Mother Brother Sister
Highness Excellency Christian Bible Latin Greek German Germany France Italy Europe Church Providence"""
_NOT_NAMES = frozenset(_TITLES.split())


def nouns_of(text: str) -> Counter[str]:
    """One of the two words after a determiner. Plurals count as their singular."""
    found = Counter[str]()
    for words in _PHRASE.findall(text):
        forms = (form for word in words for form in (word, word.removesuffix("s")))
        if noun := next((form for form in forms if form in NOUNS), None):
            found[noun] += 1
    return found


def find_nouns(text: str, n: int, random_: random.Random) -> list[str]:
    """Up to `n` things that the beginning names; those that recur in the passage are more likely."""
    everywhere, start = nouns_of(text), list(nouns_of(text[:START_CHARS]))
    chosen: list[str] = []
    while start and len(chosen) < n:
        noun = random_.choices(start, weights=[1 + everywhere[noun] ** 2 for noun in start])[0]
        chosen.append(noun)
        start.remove(noun)
    return chosen


def find_names(text: str, n: int) -> list[str]:
    """Up to `n` names that the beginning names and the passage repeats."""
    everywhere = Counter(name for name in _NAME.findall(text) if name not in _NOT_NAMES)
    return [name for name, count in everywhere.most_common() if count > 1 and name in text[:START_CHARS]][:n]
