"""Many clients at once on a real server: streamed, whole, or left in the middle, while the drive fails.

Every answer that ends well must be the one that the model gives alone. One that meets a failing drive may end with an error
of its dialect, and must not touch another. None is lost, and memory stays flat.

    make soak-serve
    python -m serve.load --seconds S --clients N --seed R
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from serve.server import Server, serving, wait_until

CHAT = "/v1/chat/completions"
WORDS = ("fox", "bear", "river", "moon", "cake", "boat", "tree", "star")
N_PROMPTS = 24
GROWTH = 64 * 2**20  # bytes that the server may grow by once it is warm


def requests(seed: int) -> list[dict]:
    """Some begin alike. All are greedy, so that an answer is a function of its request."""
    rng = random.Random(seed)
    made = []
    for i in range(N_PROMPTS):
        content = " ".join(rng.choices(WORDS, k=rng.choice((3, 20, 120))))
        messages = [{"role": "user", "content": content}]
        if made and rng.random() < 0.5:
            messages = [*rng.choice(made)["messages"], {"role": "assistant", "content": "Yes."}, *messages]
        messages = messages[-5:]
        made.append(
            {"model": "m", "messages": messages, "max_tokens": rng.choice((1, 4, 16, 48)), "temperature": 0, "n": 1 + i % 2}
        )
    return made


def texts(answer: dict) -> list[str]:
    return [choice["message"]["content"] for choice in answer["choices"]]


class Client:
    """Asks at random until the time is over."""

    def __init__(self, server: Server, bodies: list[dict], wanted: list[list[str]], seed: int, tally: Counter) -> None:
        self._server, self._bodies, self._wanted, self._tally = server, bodies, wanted, tally
        self._random, self._lock = random.Random(seed), threading.Lock()

    def run(self, end: float) -> None:
        with self._server.client(limits=httpx.Limits(max_connections=4)) as client:
            while time.monotonic() < end:
                at = self._random.randrange(len(self._bodies))
                way = self._random.choice(("whole", "stream", "leave", "leave at once"))
                self._tally[self._ask(client, self._bodies[at], self._wanted[at], way)] += 1

    def _ask(self, client: httpx.Client, body: dict, wanted: list[str], way: str) -> str:
        if way == "whole":
            answer = client.post(CHAT, json=body)
            if answer.status_code != 200:
                return _refused(answer)
            return "right" if texts(answer.json()) == wanted else "wrong"
        with client.stream("POST", CHAT, json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                answer.read()
                return _refused(answer)
            return self._follow(answer, wanted, 0 if way == "leave at once" else 5 if way == "leave" else None)

    def _follow(self, answer: httpx.Response, wanted: list[str], most: int | None) -> str:
        said = [""] * len(wanted)
        for n, line in enumerate(answer.iter_lines()):
            if most is not None and n >= most:
                return "left"
            if line == "data: [DONE]":
                return "right" if said == wanted else "wrong"
            if line.startswith("data: "):
                piece = json.loads(line.removeprefix("data: "))
                if "error" in piece:
                    return "failed" if piece["error"]["type"] == "server_error" else "wrong error"
                for choice in piece["choices"]:
                    said[choice["index"]] += choice["delta"].get("content") or ""
        return "lost"


def _refused(answer: httpx.Response) -> str:
    kind = answer.json()["error"]["type"]
    return (
        {429: "refused", 500: "failed"}.get(answer.status_code, "wrong error") if kind.endswith("_error") else "wrong error"
    )


def resident(server: Server) -> int:
    """Bytes of the process that are in memory."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def run(server: Server, alone: Server, clients: int, seconds: float, seed: int) -> Counter:
    bodies = requests(seed)
    wanted = [texts(alone.chat(**body)) for body in bodies]
    tally: Counter = Counter()
    everybody = [Client(server, bodies, wanted, seed + i, tally) for i in range(clients)]
    with ThreadPoolExecutor(clients) as pool:
        for part, share in enumerate((0.3, 0.7)):  # the first part warms it
            end = time.monotonic() + share * seconds
            for future in [pool.submit(client.run, end) for client in everybody]:
                future.result()
            if part == 0:
                before = resident(server)
    tally["grown"] = int(resident(server) - before > GROWTH)
    end = time.monotonic() + 30
    while server.get("/status").json()["running"] and time.monotonic() < end:
        time.sleep(0.05)
    status = server.get("/status").json()
    tally["stuck"] = status["running"] + status["waiting"] + len(status["requests"])
    return tally


def killed(folder: Path, times: int, seed: int) -> None:
    """kill -9 under load, again and again: each time it starts, finds the states that were written, and says the same."""
    kept = folder / "kept"
    kept.mkdir()
    options = ("--context", "2048", "--prefix-folder", str(kept), "--parallel", "2")
    messages = [{"role": "user", "content": "A fox and a bear went to the river. " * 60}]
    wanted, rng = None, random.Random(seed)
    for i in range(times + 1):
        with serving(folder, *options) as server:
            answer = server.chat(messages, max_tokens=10)
            wanted, usage = wanted or answer["choices"], answer["usage"]
            assert answer["choices"] == wanted
            assert i == 0 or usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] - 40, usage
            wait_until(lambda: any(path.is_file() for path in kept.rglob("*")))
            if i < times:
                _kill_under_load(server, rng)
    assert not list(kept.rglob("*.tmp*"))


def _kill_under_load(server: Server, rng: random.Random) -> None:
    """While requests run, and states are being written."""

    def ask(i: int) -> None:
        messages = [{"role": "user", "content": f"{i} " + "one two three " * 200}]
        body = {"model": "m", "messages": messages, "max_tokens": 200, "stream": i % 2 == 0}
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(server.url + CHAT, json=body, timeout=60)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.2 + rng.random())
    server.kill()
    for thread in threads:
        thread.join()


BAD = ("wrong", "wrong error", "lost", "grown", "stuck")
TIGHT = ("--slots", "64", "--context", "2048", "--parallel", "4", "--prefixes", "8MB")


def faulty(shim: Path, rate: int, when: Path) -> dict[str, str]:
    """The environment in which so many of 1,024 reads fail, as long as there is a file `when`."""
    return {"LD_PRELOAD": str(shim), "MOEFLUX_SHIM_FILE": "model.safetensors", "MOEFLUX_SHIM_MODE": "sometimes",
            "MOEFLUX_SHIM_RATE": str(rate), "MOEFLUX_SHIM_WHEN": str(when)}  # fmt: skip


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--seconds", type=float, default=300)
    arguments.add_argument("--clients", type=int, default=50)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--rate", type=int, default=80, help="reads of 1,024 that fail")
    arguments.add_argument("--kills", type=int, default=20)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shim = folder / "shim.so"
        source = Path(__file__).parent.parent / "store" / "shim.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, source, "-ldl"], check=True)
        when = folder / "failing"
        with serving(folder) as alone, serving(folder, *TIGHT, env=faulty(shim, given.rate, when)) as server:
            when.touch()
            tally = run(server, alone, given.clients, given.seconds, given.seed)
        killed(folder, given.kills, given.seed)
    print(f"killed {given.kills} times, and whole each time")
    print(f"{given.clients} clients, {given.seconds:g} s: {dict(tally)}")
    return int(any(tally[name] for name in BAD))


if __name__ == "__main__":
    sys.exit(main())
