"""The server engine against a real HTTP server: concurrency, retries, and what is the row's fault."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from conf.schema import Config, DataConfig, RegenerateConfig, TargetConfig
from data.chats.prompts import Questions
from data.regenerate.answers import beside
from data.regenerate.replay import Outcome, Sampling, ask
from data.regenerate.run import regenerate
from data.regenerate.server import ServerEngine, retry_after
from models.errors import EyasError
from tests.servers import Reply, Server, completion, echo, serving

ROOT = Path(__file__).parents[1]
KEY = "EYAS_TEST_KEY"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv(KEY, raising=False)


def engine(server: Server | str, model: str | None = None, **options: Any) -> ServerEngine:
    url = server if isinstance(server, str) else server.url
    options = {"key_env": KEY, "concurrency": 4, "backoff": 0.01, **options}
    return ServerEngine(url, model, Sampling(0.7, 0.9, 50, seed=1), **options)


def questions(count: int) -> list[Questions]:
    return [Questions(f"r{i}", "", "", (f"question {i}",), "in.jsonl", i + 1) for i in range(count)]


def answered(one: ServerEngine, rows: Sequence[Questions], done: Sequence[int] = ()) -> list[Outcome]:
    """Outcomes in the order of the input."""
    outcomes: list[Outcome] = []
    one.answer(ask(rows), done, outcomes.append, lambda tokens: None)
    return sorted(outcomes, key=lambda outcome: outcome.asked.index)


def texts(outcome: Outcome) -> list[str]:
    assert outcome.row is not None, (outcome.reason, outcome.detail)
    return [turn["value"] for turn in outcome.row["conversations"] if turn["from"] == "gpt"]


# --- requests ----------------------------------------------------------------------------------------------------


def test_requests_are_as_many_at_a_time_as_allowed_and_never_more() -> None:
    together = threading.Barrier(4)

    def behave(request: dict[str, Any], number: int) -> Reply:
        together.wait(timeout=30)  # goes on only when four requests are here at once
        time.sleep(0.01)
        return echo(request)

    with serving(behave) as server:
        outcomes = answered(engine(server), questions(24))
        assert server.most_in_flight == 4
    assert [texts(outcome) for outcome in outcomes] == [[f"re: question {i}"] for i in range(24)]


def test_the_request_holds_the_sampling_the_history_and_a_seed_of_its_own() -> None:
    rows = [Questions("a", "", "Be brief.", ("one", "two"), "f", 1), Questions("b", "", "", ("one",), "f", 2)]
    with serving() as server:
        one = engine(server, template_kwargs={"enable_thinking": False}, concurrency=1)
        [first, _] = answered(one, rows)
        assert texts(first) == ["re: one", "re: two"]
        again = list(server.requests)
        server.requests.clear()
        answered(one, rows)
        assert server.requests == again
    opening, following, other = again
    assert following["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "re: one"},
        {"role": "user", "content": "two"},
    ]
    sampling = {"model": "tiny", "temperature": 0.7, "top_p": 0.9, "max_tokens": 50}
    assert {key: opening[key] for key in sampling} == sampling
    assert opening["chat_template_kwargs"] == {"enable_thinking": False}
    seeds = [request["seed"] for request in again]
    assert len(set(seeds)) == 3 and all(0 <= seed < 2**31 for seed in seeds)
    assert other["messages"] == [{"role": "user", "content": "one"}]
    assert first.row is not None
    assert first.row["provenance"] == {
        "target": "tiny",
        "engine": "server",
        "temperature": 0.7,
        "top_p": 0.9,
        "max_new_tokens": 50,
        "seed": 1,
        "cut": "drop",
        "template_kwargs": {"enable_thinking": False},
        "source": "f:1",
    }


@pytest.mark.parametrize(
    ("reply", "cut", "expected"),
    [
        (completion("yes", "stop"), "drop", {"value": "yes", "finish_reason": "stop"}),
        (completion("ye", "length"), "keep", {"value": "ye", "finish_reason": "length"}),
        (completion("ye", "length"), "drop", "answer_cut"),
        (completion("ye", "abort"), "keep", "answer_cut"),
        (completion("yes", None), "drop", "answer_cut"),
        (completion(None, "stop"), "drop", "empty_answer"),
        (
            completion("\n\nyes", reasoning_content="\nhm\n"),
            "drop",
            {"value": "yes", "reasoning_content": "\nhm\n", "finish_reason": "stop"},
        ),
        (
            completion("yes", reasoning="hm", reasoning_content=None),
            "drop",
            {"value": "yes", "reasoning_content": "hm", "finish_reason": "stop"},
        ),
        (completion(None, "length", reasoning="hm"), "keep", "answer_cut"),
    ],
)
def test_what_becomes_of_each_kind_of_answer(reply: Reply, cut: str, expected: dict[str, str] | str) -> None:
    with serving(lambda request, number: reply) as server:
        [outcome] = answered(engine(server, cut=cut), questions(1))
    if isinstance(expected, str):
        assert (outcome.row, outcome.reason) == (None, expected)
    else:
        assert outcome.row is not None
        assert outcome.row["conversations"][1] == {"from": "gpt", **expected}


# --- retries -----------------------------------------------------------------------------------------------------

PASSING = [
    Reply({"error": {"message": "boom"}}, 500),
    Reply("<html>502 Bad Gateway</html>", 502),
    Reply("", 503),
    Reply("", 429),
    Reply("", 408),
    Reply("", 409),
    Reply("", 425),
    Reply(reset=True),
    Reply("{not json"),
    Reply("[]"),
    Reply({"choices": []}),
    Reply({"choices": [{"message": {"content": 7}}]}),
    Reply({"choices": [{"message": {"content": "too late"}}]}, wait=0.6),
]


def test_what_may_pass_is_tried_again_and_the_order_kept() -> None:
    def behave(request: dict[str, Any], number: int) -> Reply:
        place = int(request["messages"][-1]["content"].split()[1])
        return PASSING[place] if number < 2 else echo(request)

    with serving(behave) as server:
        outcomes = answered(engine(server, retries=2, timeout=0.3), questions(len(PASSING)))
        assert set(server.attempts.values()) == {3}
    assert [texts(outcome) for outcome in outcomes] == [[f"re: question {i}"] for i in range(len(PASSING))]


def test_a_row_that_fails_every_time_is_rejected_and_the_others_are_not() -> None:
    def behave(request: dict[str, Any], number: int) -> Reply:
        bad = request["messages"][-1]["content"] in ("question 2", "question 9")
        return Reply({"error": {"message": "boom"}}, 500) if bad else echo(request)

    with serving(behave) as server:
        outcomes = answered(engine(server, retries=3), questions(10))
        assert server.attempts["question 2"] == server.attempts["question 9"] == 4
        assert sum(server.attempts.values()) == 8 + 2 * 4
    for index, outcome in enumerate(outcomes):
        if index in (2, 9):
            assert (outcome.row, outcome.reason) == (None, "no_response")
            assert outcome.detail == "4 attempts, the last: HTTP 500: boom"
        else:
            assert texts(outcome) == [f"re: question {index}"]


def test_a_server_that_asks_to_wait_is_waited_for() -> None:
    def behave(request: dict[str, Any], number: int) -> Reply:
        return Reply("", 429, {"Retry-After": "1"}) if number == 0 else echo(request)

    with serving(behave) as server:
        [outcome] = answered(engine(server), questions(1))
        assert texts(outcome) == ["re: question 0"]
        assert server.times[1] - server.times[0] >= 1


def test_waits_grow_without_retry_after() -> None:
    with serving(lambda request, number: Reply("", 500) if number < 3 else echo(request)) as server:
        answered(engine(server, backoff=0.1), questions(1))
        waits = [after - before for before, after in zip(server.times, server.times[1:], strict=False)]
    # 0.1 doubled each time, spread between half and one and a half of it
    for wait, least in zip(waits, (0.05, 0.1, 0.2), strict=True):
        assert least <= wait < 3 * least + 0.5


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("Fri, 01 Mar 2024 12:00:30 GMT", 30.0),
        ("Fri, 01 Mar 2024 11:00:00 GMT", 0.0),
        ("soon", 0.0),
        ("", 0.0),
        (None, 0.0),
        ("nan", 0.0),
        ("inf", 0.0),
    ],
)
def test_retry_after_is_a_number_or_a_date(header: str | None, seconds: float) -> None:
    assert retry_after(header, datetime(2024, 3, 1, 12, 0, 0, tzinfo=UTC)) == seconds


# --- the row's fault, and not ------------------------------------------------------------------------------------


def test_a_refused_row_is_rejected_by_name_and_not_tried_again() -> None:
    long = "This model's maximum context length is 64 tokens. However, you requested 99 tokens"

    def behave(request: dict[str, Any], number: int) -> Reply:
        last = request["messages"][-1]["content"]
        if last == "question 1":
            return Reply({"object": "error", "message": long}, 400)
        return Reply({"error": {"message": "no such thing"}}, 422) if last == "question 2" else echo(request)

    with serving(behave) as server:
        kept, too_long, refused, last = answered(engine(server), questions(4))
        assert set(server.attempts.values()) == {1}
    assert (too_long.row, too_long.reason, too_long.detail) == (None, "prompt_too_long", f"HTTP 400: {long}")
    assert (refused.row, refused.reason, refused.detail) == (None, "request_refused", "HTTP 422: no such thing")
    assert texts(kept) == ["re: question 0"] and texts(last) == ["re: question 3"]


def test_a_later_turn_that_fails_leaves_the_answers_before_it() -> None:
    def behave(request: dict[str, Any], number: int) -> Reply:
        too_long = Reply({"error": {"message": "context length"}}, 400)
        return too_long if request["messages"][-1]["content"] == "two" else echo(request)

    with serving(behave) as server:
        [outcome] = answered(engine(server), [Questions("a", "", "", ("one", "two", "three"), "f", 1)])
    assert texts(outcome) == ["re: one"]
    assert outcome.row is not None and outcome.row["provenance"]["left_out"] == "prompt_too_long"


@pytest.mark.parametrize("status", [400, 500])
def test_a_server_that_answers_nothing_at_all_stops_the_run(status: int) -> None:
    """Its refusals are not written down as the rows' fault."""
    with serving(lambda request, number: Reply({"error": {"message": "seed: unknown"}}, status)) as server:
        one = engine(server, retries=1, concurrency=2)
        outcomes: list[Outcome] = []
        with pytest.raises(EyasError, match="8 rows in a row without an answer, the last: .*seed: unknown"):
            one.answer(ask(questions(30)), (), outcomes.append, lambda tokens: None)
        assert outcomes == [] and len(server.attempts) < 12


def test_a_server_that_goes_away_at_the_end_rejects_no_row() -> None:
    with serving() as server:
        one = engine(server, retries=0)
    with pytest.raises(EyasError, match=r"regenerate\.server=http://127.0.0.1:\d+/v1: no server answers there"):
        answered(one, questions(3))


# --- at start-up -------------------------------------------------------------------------------------------------


def test_a_missing_server_is_told_before_any_work() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(EyasError, match=rf"regenerate\.server=http://127.0.0.1:{port}/v1: no server answers there"):
        engine(f"http://127.0.0.1:{port}/v1/")


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://x/v1", "http://", "http:// /v1", "x"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(EyasError, match=r"regenerate\.server"):
        engine(url)


def test_the_model_must_be_one_that_is_served() -> None:
    with serving(models=("base", "lora")) as server:
        with pytest.raises(EyasError, match=r"regenerate\.model=other: http.* serves base, lora; give one of these"):
            engine(server, "other")
        with pytest.raises(EyasError, match=r"regenerate\.model=null: http.* serves base, lora; give one of these"):
            engine(server)
        assert engine(server, "lora").settings["target"] == "lora"
    with serving(models=()) as server, pytest.raises(EyasError, match="serves nothing"):
        engine(server)


def test_a_url_without_v1_is_told() -> None:
    with serving() as server, pytest.raises(EyasError, match=r"lists no models \(HTTP 404.*mostly listen at .*/v1"):
        engine(server.url.removesuffix("/v1"))


def test_the_key_is_sent_but_never_told_or_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with serving(key="s3cret") as server:
        with pytest.raises(EyasError, match=rf"the environment variable {KEY} .*is not set"):
            engine(server)
        monkeypatch.setenv(KEY, "wr0ng")
        with pytest.raises(EyasError, match="holds a key that is refused") as refused:
            engine(server)
        monkeypatch.setenv(KEY, "s3cret\n")
        source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
        source.write_text("one\ntwo\n")
        regenerate(config(server.url, source, out))
        server.key = "chang3d"
        with pytest.raises(EyasError, match="HTTP 401") as later:
            answered(engine_of(server), questions(3))
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    for text in (written, caplog.text, str(refused.value), str(later.value)):
        assert not any(key in text for key in ("s3cret", "wr0ng", "chang3d"))
    monkeypatch.setenv(KEY, "s3crét")
    with pytest.raises(EyasError, match="characters that no key has"):
        engine("http://127.0.0.1:1/v1")
    with pytest.raises(EyasError, match="has a user name or key in it") as told:
        engine("http://me:s3cret@127.0.0.1:1/v1")
    assert "s3cret" not in str(told.value)


def engine_of(server: Server) -> ServerEngine:
    """An engine whose key is refused only after it was made."""
    wanted, server.key = server.key, None
    one = engine(server)
    server.key = wanted
    return one


# --- the verb ----------------------------------------------------------------------------------------------------


def config(url: str, source: Path, out: Path, **target: Any) -> Config:
    options: dict[str, Any] = {"out": str(out), "server": url, "api_key_env": KEY, "concurrency": 3}
    return Config(
        name="x",
        target=TargetConfig(path="not/read", **target),
        data=DataConfig(path=str(source)),
        regenerate=RegenerateConfig(**options),
    )


def test_settings_that_a_server_cannot_take_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("one\n")
    with serving() as server:
        with pytest.raises(EyasError, match=r"target\.chat_template: a server uses its own"):
            regenerate(config(server.url, source, out, chat_template="x.jinja"))
        regenerate(config(server.url, source, out, template_kwargs={"today": "2024-01-01", "mood": "calm"}))
        assert server.requests[0]["chat_template_kwargs"] == {"mood": "calm"}
    assert "template_kwargs.today has no effect on a server" in caplog.text


def start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe, same = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, stdout=pipe, stderr=same)


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_asks_only_what_is_missing(tmp_path: Path, kill: signal.Signals) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": f"r{i}", "turns": [f"question {i}"]}) + "\n" for i in range(60)))
    enough = threading.Event()

    def behave(request: dict[str, Any], number: int) -> Reply:
        if len(server.requests) > 20 and not enough.is_set():
            enough.wait(timeout=60)  # slow from here on, until the run is killed
        return echo(request)

    with serving(behave) as server:
        command = [sys.executable, "-m", "data.regenerate", "conf=debug", f"regenerate.server={server.url}"]
        command += [f"data.path={source}", f"regenerate.out={out}", "regenerate.concurrency=3"]
        process = start(command, tmp_path)
        until = time.monotonic() + 120
        while len(server.requests) < 23 or beside(out, ".part").read_bytes().count(b"\n") < 21:
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.005)
        process.send_signal(kill)
        said, _ = process.communicate(timeout=60)
        enough.set()
        if kill == signal.SIGINT:
            assert process.returncode == 130 and "Traceback" not in said
            assert "20 of 60 rows are answered" in said and "the same command continues" in said
        server.requests.clear()
        regenerate(config(server.url, source, out))
        assert len(server.requests) == 40
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"r{i}" for i in range(60)]
    assert [row["conversations"][1]["value"] for row in rows] == [f"re: question {i}" for i in range(60)]
