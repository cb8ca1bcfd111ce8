"""Sweeps of ``python -m train``: jobs and their folders, those that fail, and the one report of those that finish."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from conf.cli import entry, is_plain_sweep
from conf.schema import Config
from eval.look.table import VERSION
from eval.run import evaluate_run
from models.errors import EyasError
from models.signals import INTERRUPTED
from tests.commands import command, workplace  # noqa: F401
from train.stages import walk
from train.sweep import plan, run_sweep, start_process

ROOT = Path(__file__).parents[1]


@dataclass
class Machine:
    """Stands in for the processes: jobs end as ``ends`` says by the name of their folder, and note down that they were
    measured with ``made_from``."""

    ends: dict[str, int] = field(default_factory=dict)
    made_from: str = "prompts and settings"
    ran: list[tuple[str, ...]] = field(default_factory=list)

    def __call__(self, verb: str, overrides: Sequence[str]) -> int:
        folder = Path(overrides[-1].removeprefix('hydra.run.dir="').removesuffix('"'))
        self.ran.append((verb, *overrides))
        code = self.ends.get(verb if verb == "eval" else folder.name, 0)
        if code == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "report.json").write_text(json.dumps({"version": VERSION}))
            if verb == "train":
                (folder / "stages.json").write_text(json.dumps({"evaluation": f"{folder.name}: {self.made_from}"}))
        return code

    @property
    def trained(self) -> list[str]:
        return [Path(typed[-1].rstrip('"')).name for typed in self.ran if typed[0] == "train"]

    @property
    def compared(self) -> list[tuple[str, ...]]:
        return [typed for typed in self.ran if typed[0] == "eval"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr("eval.look.report.print_report", lambda report: None)  # the stand-in's reports hold nothing
    return Machine()


# --- jobs ---


@pytest.mark.parametrize(
    ("typed", "folder", "names"),
    [
        (["conf=debug,eagle3_smollm2"], "conf", ["debug", "eagle3_smollm2"]),
        (["optim.lr=1e-3,3e-4", "seed=1"], "optim.lr,seed=1", ["optim.lr=0.001", "optim.lr=0.0003"]),
        (["conf=debug,eagle3_smollm2", "seed=4,4"], "conf,seed", ["debug,seed=4", "eagle3_smollm2,seed=4"]),
        (["seed=1,2", "name=mine", "threads=1"], "mine", ["seed=1", "seed=2"]),
        (["seed=range(3)"], "seed", ["seed=0", "seed=1", "seed=2"]),
        (["seed=7"], "seed=7", ["run"]),
        (["target.taps=[1,2],[3]"], "target.taps", ["target.taps=_1,2_-b4f8b934", "target.taps=_3_-7f4b5fb1"]),
    ],
)
def test_folders_tell_what_is_swept(typed: list[str], folder: str, names: list[str]) -> None:
    found, jobs = plan(typed)
    assert found == Path("outputs/sweeps") / folder
    assert [(job.name, job.folder) for job in jobs] == [(name, found / name) for name in names]


def test_every_job_is_typed_as_it_would_be_alone() -> None:
    _, jobs = plan(["conf=debug,eagle3_smollm2", "+data.roles.Kunde=user", 'data.path="a/b c.json"', "seed=1,2"])
    fixed = ("+data.roles.Kunde=user", 'data.path="a/b c.json"')
    assert jobs[0].overrides == ("conf=debug", "seed=1", *fixed)
    assert jobs[3].overrides == ("conf=eagle3_smollm2", "seed=2", *fixed)
    assert len({job.folder for job in jobs}) == 4


@pytest.mark.parametrize("typed", ["output_dir=x", "export.dir=x", "hydra.run.dir=x", "optim.lr=interval(0,1)"])
def test_what_makes_no_sweep_names_its_key(typed: str) -> None:
    with pytest.raises(EyasError, match=f"^{typed.partition('=')[0]}: "):
        plan(["seed=1,2", typed])


def test_hydras_own_sweeps_stay_hydras() -> None:
    assert is_plain_sweep(["--multirun", "seed=1,2"]) and is_plain_sweep(["-m", "seed=1,2", "hydra.verbose=true"])
    for other in ("--cfg=job", "hydra/sweeper=optuna", "+hydra/launcher=joblib", "hydra.sweep.dir=x"):
        assert not is_plain_sweep(["-m", "seed=1,2", other])
    assert not is_plain_sweep(["seed=1"])


def test_a_sweep_is_told_from_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """--multirun anywhere goes to the sweep, whose exit code is the command's; anything else to the run."""
    swept, ran = [], list[Config]()

    def sweep(overrides: Sequence[str]) -> int:
        swept.append(list(overrides))
        return 7

    main = entry("train", sweep=sweep)(ran.append)
    monkeypatch.setattr(sys, "argv", ["train", "seed=1,2", "--multirun", "threads=1"])
    with pytest.raises(SystemExit) as left:
        main()
    assert (left.value.code, swept, ran) == (7, [["seed=1,2", "threads=1"]], [])
    monkeypatch.setattr(sys, "argv", ["train", "seed=3"])
    main()
    assert len(swept) == 1 and [cfg.seed for cfg in ran] == [3]


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(EyasError, match="--multirun: a sweep runs in one process"):
        run_sweep(["seed=1,2"])


# --- jobs that fail ---


def test_all_finish_and_are_compared_by_one_command(machine: Machine) -> None:
    assert run_sweep(["optim.lr=1e-3,3e-4", "threads=1"], machine) == 0
    sweep = "outputs/sweeps/optim.lr,threads=1"
    one, two = f'"{sweep}/optim.lr=0.001"', f'"{sweep}/optim.lr=0.0003"'
    assert machine.ran == [
        ("train", "optim.lr=0.001", "threads=1", f"hydra.run.dir={one}"),
        ("train", "optim.lr=0.0003", "threads=1", f"hydra.run.dir={two}"),
        ("eval", "optim.lr=0.001", "threads=1", f"drafter_path=[{one},{two}]", f'hydra.run.dir="{sweep}"'),
    ]
    jobs = json.loads(Path(sweep, "sweep.json").read_text())["jobs"]
    assert [(job["name"], job["message"]) for job in jobs] == [("optim.lr=0.001", None), ("optim.lr=0.0003", None)]


@pytest.mark.parametrize(
    ("typed", "wrong", "told"),
    [
        ("train.depths=0,2,3", "train.depths=0", "train.depths=0: must be at least 1"),
        ("conf=nope,eagle3_smollm2,eagle3_smollm2_long", "nope", "conf=nope: there is no such choice"),
        ("optim.lr=1e-3,x,1e-4", "optim.lr=x", "optim.lr: Value 'x'"),
    ],
)
def test_a_wrong_job_is_told_at_once_and_the_others_go_on(
    machine: Machine, capsys: pytest.CaptureFixture[str], typed: str, wrong: str, told: str
) -> None:
    assert run_sweep([typed], machine) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"sweep: {wrong}: {told}")  # before the first one starts
    assert any(line.startswith(f"sweep: {wrong}: left out, {told}") for line in lines[-3:])
    assert len(machine.trained) == 2 and wrong not in machine.trained
    assert len(machine.compared) == 1


@pytest.mark.parametrize(
    ("code", "how", "left"), [(-9, "killed by signal 9", 1), (1, "exit code 1", 1), (2, "exit code 2", 2)]
)
def test_a_job_that_dies_is_told_and_the_others_go_on(
    machine: Machine, capsys: pytest.CaptureFixture[str], code: int, how: str, left: int
) -> None:
    machine.ends = {"seed=2": code}
    assert run_sweep(["seed=1,2,3"], machine) == left
    assert machine.trained == ["seed=1", "seed=2", "seed=3"]
    (comparison,) = machine.compared
    assert "seed=2" not in comparison[2]
    assert f"sweep: seed=2: failed, {how}" in capsys.readouterr().out
    machine.ends = {}
    assert run_sweep(["seed=1,2,3"], machine) == 0 and len(machine.compared) == 2


def test_an_interrupt_ends_the_sweep(machine: Machine) -> None:
    machine.ends = {"seed=1": INTERRUPTED}
    with pytest.raises(SystemExit) as left:
        run_sweep(["seed=1,2"], machine)
    assert left.value.code == INTERRUPTED and machine.trained == ["seed=1"]


def test_a_killed_sweep_has_noted_how_far_it_got(machine: Machine) -> None:
    """After planning and after every job: what is read while the third of four jobs runs."""
    seen: list[list[str | None]] = []

    def start(verb: str, overrides: Sequence[str]) -> int:
        if verb == "train":
            seen.append([job["message"] for job in json.loads(Path("outputs/sweeps/x/sweep.json").read_text())["jobs"]])
        return machine(verb, overrides)

    machine.ends = {"train.steps=2": 1}
    assert run_sweep(["train.steps=0,1,2,3", "name=x"], start) == 1
    wrong, waits = "left out, train.steps=0: must be at least 1", "not finished"
    died = "failed, exit code 1; what it said stands above"
    assert seen == [[wrong, waits, waits, waits], [wrong, None, waits, waits], [wrong, None, died, waits]]
    jobs = json.loads(Path("outputs/sweeps/x/sweep.json").read_text())["jobs"]
    assert [job["message"] for job in jobs] == [wrong, None, died, None]


def test_a_failed_comparison_is_a_failure_and_is_tried_again(machine: Machine) -> None:
    machine.ends = {"eval": 2}
    assert run_sweep(["seed=1,2"], machine) == 2
    machine.ends = {}
    assert run_sweep(["seed=1,2"], machine) == 0 and len(machine.compared) == 2


# --- what is compared ---


def test_the_comparison_is_made_again_only_if_a_job_has_changed(machine: Machine) -> None:
    for made_from, times in (("a", 1), ("a", 1), ("b", 2)):
        machine.made_from = made_from
        assert run_sweep(["seed=1,2"], machine) == 0
        assert len(machine.compared) == times
    assert run_sweep(["seed=1,2,3"], machine) == 0  # the same folder: finished jobs are found again
    assert len(machine.compared) == 3
    report = Path("outputs/sweeps/seed/report.json")
    report.unlink()
    assert run_sweep(["seed=1,2,3"], machine) == 0 and len(machine.compared) == 4
    for times, content in enumerate(('{"version": 1}', "{", "[]", "{}"), 5):  # of an older version, or damaged
        report.write_text(content)
        assert run_sweep(["seed=1,2,3"], machine) == 0 and len(machine.compared) == times


def test_jobs_for_another_target_are_left_out_and_told(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_sweep(["target.path=tiny:llama,tiny:qwen3", "seed=1,2"], machine) == 0
    (comparison,) = machine.compared
    assert comparison[3].count("tiny_llama") == 2 and "qwen3" not in comparison[3]
    told = capsys.readouterr().out
    assert told.count("not compared, it drafts for tiny:qwen3") == 2


def test_one_that_held_nothing_out_is_not_compared(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    def start(verb: str, overrides: Sequence[str]) -> int:
        code = machine(verb, overrides)
        if "seed=2" in overrides:
            Path(overrides[-1].removeprefix('hydra.run.dir="').rstrip('"'), "stages.json").unlink()
        return code

    assert run_sweep(["seed=1,2"], start) == 0
    told = capsys.readouterr().out
    assert "seed=2: not compared, no conversation is held out" in told and "nothing to compare" in told
    assert machine.compared == []


def test_settings_that_differ_are_told(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    run_sweep(["verify.gamma=2,3", "optim.lr=1e-3,1e-4"], machine)
    told = capsys.readouterr().out
    assert told.count("the jobs differ in") == 1
    assert "in verify.gamma: all are compared with 2, that of verify.gamma=2,optim.lr=0.001" in told
    assert machine.compared[0][1:3] == ("verify.gamma=2", "optim.lr=0.001")
    run_sweep(["data.valid_fraction=0.2,0.3"], machine)
    assert "the conversations that data.valid_fraction=0.2 held out" in capsys.readouterr().out
    Path("asked.txt").write_text("Hello?\n")
    run_sweep(["data.valid_fraction=0.2,0.3", "verify.prompts=asked.txt"], machine)
    assert "the jobs differ" not in capsys.readouterr().out


def test_a_single_job_needs_no_comparison(machine: Machine) -> None:
    assert run_sweep(["seed=7"], machine) == 0
    assert machine.trained == ["run"] and machine.compared == []


# --- processes ---


def test_a_process_ends_with_its_own_code(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    (workplace / "own_verb.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    (workplace / "json.py").write_text("raise SystemExit(99)\n")  # a file of the user's own shadows no module
    monkeypatch.setenv("PYTHONPATH", str(workplace))
    assert [start_process("own_verb", [code]) for code in ("0", "2", "5")] == [0, 2, 5]
    monkeypatch.delenv("PYTHONPATH")
    assert start_process("json.tool", ["--help"]) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems let a child outlive its parent")
def test_a_killed_sweep_leaves_no_job_running(workplace: Path) -> None:  # noqa: F811
    pid = workplace / "pid"
    (workplace / "own_verb.py").write_text(
        "import os, pathlib, sys, time\npath = pathlib.Path(sys.argv[1])\n"
        "path.with_suffix('.new').write_text(str(os.getpid()))\npath.with_suffix('.new').rename(path)\ntime.sleep(600)\n"
    )
    code = f"from train.sweep import start_process; start_process('own_verb', [{str(pid)!r}])"
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(workplace)))}
    sweep = subprocess.Popen([sys.executable, "-c", code], env=env)
    wait_for(pid.exists)
    sweep.send_signal(signal.SIGKILL)
    sweep.wait()
    wait_for(lambda: not alive(int(pid.read_text())))


def alive(pid: int) -> bool:
    """Whether the process exists and has not ended (one that nobody waits for stays as a zombie)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(holds: Callable[[], bool]) -> None:
    for _ in range(6000):
        if holds():
            return
        time.sleep(0.02)
    pytest.fail("never happened")


# --- the real flow ---

QUICK = (
    *("train.steps=2", "verify.max_prompts=1", "verify.max_new_tokens=4", "verify.temperatures=[0.0]"),
    *("verify.costs=false", "verify.baseline=false", "device=cpu", "tracker=none", "preview=0"),
)


def in_process(verb: str, overrides: Sequence[str]) -> int:
    """A job in this process, where everything is loaded already."""
    try:
        command(walk if verb == "train" else evaluate_run, *overrides, job=verb)
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def test_real_jobs_share_a_store_and_end_in_one_report(capsys: pytest.CaptureFixture[str]) -> None:
    swept = ["drafter=eagle3,eagle3_1", "name=both", *QUICK]
    assert run_sweep(swept, in_process) == 0
    (sweep,) = Path("outputs/sweeps").iterdir()
    report = json.loads((sweep / "report.json").read_text())
    names = [drafter["name"] for drafter in report["drafters"]]
    assert (sweep.name, names) == ("both", ["drafter=eagle3", "drafter=eagle3_1"])
    assert [(entry["a"], entry["b"]) for entry in report["comparisons"]] == [tuple(names)]
    assert (sweep / "report.html").exists() and report["settings"]["tree"] == "chain"
    assert len(list(Path("outputs/features").iterdir())) == 2  # training and held-out documents, for both drafters
    for name, drafter in zip(names, report["drafters"], strict=True):
        own = json.loads((sweep / name / "report.json").read_text())  # each job's own measurement, on the same prompt
        (run,) = [run for run in report["runs"] if run["drafter"] == name]
        assert run["acceptance"] == own["runs"][0]["acceptance"] and drafter["path"].startswith(str(sweep / name))
    before = (sweep / "report.json").stat().st_mtime_ns
    capsys.readouterr()
    assert run_sweep(swept, in_process) == 0
    told = capsys.readouterr().out
    assert told.count("this run is finished: 2 of 2 steps done") == 2
    assert "comparison: up to date" in told and (sweep / "report.json").stat().st_mtime_ns == before
    assert "paired comparison" in told  # the table is shown again
