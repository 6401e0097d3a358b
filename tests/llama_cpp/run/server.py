# SPDX-License-Identifier: MIT
"""The real llama-server under kvmeld-run, over HTTP, with nothing but Python's standard library.

    python3 tests/llama_cpp/run/server.py FOLDER MODEL.gguf [--requests 200]

FOLDER has llama-server; the script `server` beside this file builds one. Prints a line per check and a table
of figures; exits with 1 where a check fails.
"""

import argparse
import concurrent.futures
import http.client
import json
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
RUN = ROOT / "build" / "release" / "bin" / "kvmeld-run"
TEXT = (ROOT / "examples" / "models" / "held-out.txt").read_text(encoding="utf-8")
failures = []


def check(ok, what):
    print(("ok      " if ok else "FAILED  ") + what, flush=True)
    if not ok:
        failures.append(what)


class Server:
    """llama-server, as it is or under kvmeld-run with a budget."""

    def __init__(self, options, budget=None, more=(), run=()):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        self.saved = tempfile.TemporaryDirectory()
        command = [str(options.folder / "llama-server"), "-m", str(options.model), "--port", str(self.port),
                   "-c", str(options.context), "-t", str(options.threads), "--slot-save-path", self.saved.name, *more]
        if budget:
            command = [str(RUN), "--budget", budget, "--on-refusal", "stop", *run, "--", *command]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)

    def __enter__(self):
        for _ in range(600):
            try:
                if self.get("/health")[0] == 200:
                    return self
            except OSError:
                pass
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise SystemExit("the server did not start:\n" + self.words()[-3000:])

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(30)

    def words(self):
        self.log.flush()
        return pathlib.Path(self.log.name).read_text(errors="replace")

    def alive(self):
        return self.process.poll() is None

    def resident(self):
        """MiB."""
        for line in pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        return 0.0

    def request(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request(method, path, json.dumps(body) if body is not None else None, {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def get(self, path):
        connection, answer = self.request("GET", path)
        try:
            return answer.status, answer.read()
        finally:
            connection.close()

    def post(self, path, body):
        connection, answer = self.request("POST", path, body)
        try:
            text = answer.read()
            return json.loads(text) if answer.status == 200 else {"error": text.decode(errors="replace")}
        finally:
            connection.close()

    def complete(self, prompt, tokens=24, **more):
        return self.post("/completion", {"prompt": prompt, "n_predict": tokens, "temperature": 0, "seed": 1, **more})

    def chat(self, words, tokens=32, **more):
        return self.post("/v1/chat/completions",
                         {"messages": [{"role": "user", "content": words}], "max_tokens": tokens, "temperature": 0, **more})

    def stream(self, prompt, tokens, stop_after=None):
        """The pieces; the connection is closed after `stop_after` of them."""
        connection, answer = self.request(
            "POST", "/completion", {"prompt": prompt, "n_predict": tokens, "temperature": 0, "stream": True})
        pieces = []
        try:
            for line in answer:
                if line.startswith(b"data: ") and b"[DONE]" not in line:
                    pieces.append(json.loads(line[6:]).get("content", ""))
                if stop_after is not None and len(pieces) >= stop_after:
                    break
        finally:
            connection.close()
        return pieces


def content(answer):
    return answer.get("content", answer)


def part(seed, characters):
    begin = random.Random(seed).randrange(len(TEXT) - characters)
    return TEXT[begin:begin + characters]


FACT = " The secret word of the harbour master is marmalade. "
QUESTION = "\nQuestion: what is the secret word of the harbour master?\nAnswer: The secret word of the harbour master is"


def needle(characters):
    text = part(7, characters)
    at = text.find(". ", characters // 4) + 1
    return text[:at] + FACT + text[at:] + QUESTION


# Several slots, and prompts in one piece: under compression their pieces decide a little of what is kept.
SLOTS = ["-np", "4", "-kvu", "-b", "2048", "-ub", "2048"]


def behaviour(options, budget, name, run=()):
    """What a server must do under us, whatever the budget."""
    with Server(options, budget, SLOTS, run) as s:
        check("kvmeld-run: " in s.words() and "slots per head" in s.words(), f"{name}: compressed, as stderr says")
        prompts = [part(i, 200 + 200 * i) for i in range(4)]
        alone = [content(s.complete(p, id_slot=i)) for i, p in enumerate(prompts)]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda x: content(s.complete(x[1], id_slot=x[0], cache_prompt=False)), enumerate(prompts)))
        check(alone == together, f"{name}: four slots at once answer as one by one")
        pieces = s.stream(prompts[1], 24)
        check("".join(pieces) == alone[1] and len(pieces) > 5, f"{name}: streaming, the same text in pieces")
        check(content(s.complete(prompts[2])) == alone[2], f"{name}: the same long prompt again")
        first = content(s.complete(prompts[2] + " And then", id_slot=2))
        again = content(s.complete(prompts[2] + " But then", id_slot=2))
        check(first == content(s.complete(prompts[2] + " And then", id_slot=0, cache_prompt=False)) and
              again == content(s.complete(prompts[2] + " But then", id_slot=0, cache_prompt=False)),
              f"{name}: the same long prefix twice")
        chat = s.chat("Name three colours.")
        check("choices" in chat and chat["choices"][0]["message"]["content"], f"{name}: chat completions")
        # Save, other work, restore; the text goes on from what was restored.
        before = s.complete(prompts[3], 16, id_slot=3)
        saved = s.post("/slots/3?action=save", {"filename": "a.bin"})
        go_on = prompts[3] + content(before)
        wanted = content(s.complete(go_on, 16, id_slot=3))
        s.complete(part(50, 500), 8, id_slot=3)
        restored = s.post("/slots/3?action=restore", {"filename": "a.bin"})
        got = s.complete(go_on, 16, id_slot=3)
        check(saved.get("n_saved", 0) > 0 and restored.get("n_restored") == saved.get("n_saved"),
              f"{name}: a slot of {saved.get('n_saved')} tokens saved and restored ({saved.get('n_written')} bytes)")
        check(content(got) == wanted and got["timings"]["prompt_n"] < 40,
              f"{name}: it goes on as it would have ({got['timings']['prompt_n']} tokens read again)")
        # Cancelled in the middle.
        s.stream(prompts[3], 400, stop_after=3)
        time.sleep(0.3)
        check(content(s.complete(prompts[1], cache_prompt=False)) == alone[1], f"{name}: a request that was cancelled leaves no trace")
        check(s.alive(), f"{name}: alive")
        # Parallel answers of one prompt: copies.
        several = s.post("/v1/completions", {"prompt": prompts[0], "max_tokens": 8, "temperature": 0, "n": 3})
        texts = [c["text"] for c in several.get("choices", [])]
        check(len(texts) == 3 and len(set(texts)) == 1, f"{name}: three answers of one prompt, by copies")
        repeated = 3 * part(3, 400)
        plain = content(s.complete(repeated, 100, ignore_eos=True))
    with Server(options, budget, [*SLOTS, "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "6"], run) as s:
        drafted = s.complete(repeated, 100, ignore_eos=True)
        check(content(drafted) == plain, f"{name}: drafts change nothing ({drafted['timings'].get('draft_n_accepted')} of "
                                         f"{drafted['timings'].get('draft_n')} accepted)")
    # The server's own cache of prompts would grow for gigabytes.
    with Server(options, budget, [*SLOTS, "--cache-ram", "16"], run) as s:
        many(options, s, name)


def many(options, s, name):
    """Requests of mixed lengths, eight clients for four slots."""
    lengths = random.Random(3)
    work = [(part(100 + i, lengths.randrange(20, options.context)), lengths.randrange(1, 24)) for i in range(options.requests)]
    for prompt, tokens in work[:8]:
        s.complete(prompt, tokens)
    began = s.resident()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda w: content(s.complete(*w)), work))
    middle = s.resident()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        again = list(pool.map(lambda w: content(s.complete(*w)), work))
    ended = s.resident()
    one_by_one = [content(s.complete(*w, cache_prompt=False)) for w in work[:options.requests // 4]]
    same = sum(a == b for a, b in zip(answers, one_by_one))
    check(s.alive() and all(isinstance(a, str) for a in answers + again), f"{name}: {2 * len(work)} requests of mixed lengths, no error")
    # Heads that share slots may divide them otherwise where a prompt was read in other pieces.
    least = 0.9 * len(one_by_one) if name == "10%" else len(one_by_one)
    check(same >= least, f"{name}: {same} of {len(one_by_one)} of them answer as one by one")
    check(ended < middle + 20, f"{name}: resident {began:.0f}, {middle:.0f}, {ended:.0f} MiB: before, after the first and the second round")


def figures(options):
    """Memory from outside, speed, and a fact, beside the server as it is."""
    long = needle(options.characters)
    prompts = [part(20 + i, 200 + 300 * i) for i in range(12)]
    rows, answers = {}, {}
    print("\n| cache | resident at the start, MiB | with the text, MiB | tokens | prompt, tokens/s | decode, tokens/s | fact | answers as plain's |")
    print("|---|---|---|---|---|---|---|---|")
    for name, budget, more, run in (("plain", None, (), ()), ("plain, q8_0", None, ("-ctk", "q8_0", "-ctv", "q8_0"), ()),
                                    ("100%", "100%", (), ("--rows", "half")), ("10%", "10%", (), ())):
        with Server(options, budget, ["-np", "1", *more], run) as s:
            started = s.resident()
            answers[name] = [content(s.complete(p)) for p in prompts]
            answer = s.complete(long, 64, ignore_eos=True)
            times = answer["timings"]
            rows[name] = (started, s.resident(), times["prompt_n"], times["prompt_per_second"], times["predicted_per_second"],
                          "marmalade" in answer["content"], sum(a == b for a, b in zip(answers[name], answers["plain"])))
            r = rows[name]
            print(f"| {name} | {r[0]:.0f} | {r[1]:.0f} | {r[2]} | {r[3]:.0f} | {r[4]:.1f} | {'yes' if r[5] else 'no'} | {r[6]} of {len(prompts)} |",
                  flush=True)
    check(rows["100%"][6] == len(prompts), "100%: answers are the plain server's")
    check(rows["10%"][5] == rows["plain"][5], "10%: the fact is found where the plain server finds it")


def refusals(options):
    """A model or a cache that cannot be compressed."""
    with Server(options, "10%", ["-ctk", "q4_0", "-ctv", "q4_0"], ["--on-refusal", "continue"]) as s:
        check("goes on with llama.cpp's own cache" in s.words() and "quantised K" in s.words(), "refused: q4_0, said, and uncompressed")
        check(isinstance(content(s.complete("Once upon a time", 8)), str), "refused: the server answers")
    try:
        with Server(options, "10%", ["-ctk", "q4_0", "-ctv", "q4_0"]):
            check(False, "refused: --on-refusal stop stops")
    except SystemExit as e:
        check("quantised K" in str(e), "refused: --on-refusal stop stops")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--characters", type=int, default=8000, help="of the long text")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="refusals,behaviour,figures")
    options = parser.parse_args()
    for one in options.only.split(","):
        if one == "refusals":
            refusals(options)
        elif one == "behaviour":
            behaviour(options, "100%", "100%", ["--rows", "half"])
            behaviour(options, "10%", "10%")
            behaviour(options, "10%", "10%, equal", ["--equal"])
        else:
            figures(options)
    if failures:
        sys.exit(f"{len(failures)} checks failed")


main()
