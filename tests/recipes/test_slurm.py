"""The recipe for Slurm, with stubs for Slurm, Ray and fedfleet: what it would run, and how it ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedfleet.experiments.same_run import MAY_CHANGE
from tests.recipes.files import ROOT, options_in, options_of_ray_start

BATCH = ROOT / "recipes" / "slurm" / "fedfleet.sbatch"
GO = ROOT / "recipes" / "run_or_resume.sh"
HEAD = "192.0.2.1"
STUBS = {
    "srun": """while [[ $1 == --* ]]; do shift; done
case $1 in
  rm) "$@" ;;
  ray) umask >> "$SEEN"; echo "token $RAY_AUTH_MODE ${RAY_AUTH_TOKEN:?}" >> "$SEEN"; exec sleep 30 ;;
esac""",
    "scontrol": """[ "$1" != show ] || printf '%s\\n' ${3//,/ }""",
    "getent": """printf '%s STREAM\\n' ${ADDRESSES-127.0.1.1 192.0.2.1}""",
    "hostname": """echo ${ADDRESSES-192.0.2.1 192.0.2.9}""",
    "ss": """[ "${*: -1}" != "sport = :${TAKEN-}" ] || echo LISTEN""",
    "python3": "exit ${GRPC-1}",
    "ray": """case $1 in
  get-auth-token) exit ${TOKENS-0} ;;
  health-check) exit ${HEALTH-0} ;;
esac""",
    "fedfleet": """trap 'echo terminated >> "$SEEN"; exit 143' TERM
while [ "$(grep -c ^token "$SEEN")" -lt "${STARTS-0}" ]; do sleep 0.02; done
case ${RUN-0} in
  wait) touch "$SEEN.up"; while :; do sleep 0.02; done ;;
  *) exit ${RUN-0} ;;
esac""",
}
"""Programs that say what they were called with; then, bodies."""


class Job:
    """A job in a folder of its own, and what it has called."""

    def __init__(self, folder: Path):
        self.seen, stubs = folder / "seen", folder / "bin"
        self.seen.touch()
        stubs.mkdir()
        for name, body in STUBS.items():
            stub = stubs / name
            stub.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> "$SEEN"\n{body}\n')
            stub.chmod(0o755)
        self.environment = {
            "PATH": f"{stubs}:/usr/bin:/bin", "SEEN": str(self.seen), "SLURM_JOB_NODELIST": "n1,n2,n3",
            "SLURM_CPUS_PER_TASK": "4", "SLURM_MEM_PER_NODE": "1000", "SLURM_SUBMIT_DIR": str(ROOT),
        }  # fmt: skip

    def start(self, number: int, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start a job; its run ends no sooner than all of Ray has been started."""
        environment = self.environment | {"SLURM_JOB_ID": str(number)} | environment
        starts = len(self.called("token")) + (2 if "," in environment["SLURM_JOB_NODELIST"] else 1)
        return subprocess.Popen(
            ["bash", str(BATCH), *(arguments or ("CONFIG", "OUT"))],
            env=environment | {"STARTS": str(starts)},
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, number: int, *arguments: str, **environment: str) -> tuple[int, str]:
        process = self.start(number, *arguments, **environment)
        said = process.communicate(timeout=20)[1]
        return process.returncode, said

    def called(self, *beginning: str) -> list[str]:
        """Return the lines of what was called that begin so; and the tokens that were seen."""
        lines = self.seen.read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line.startswith(beginning)]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_one_ray_start_a_node_then_the_run_then_nothing_is_left(job: Job):
    number = 6000 * os.getpid() + 1
    folder = Path(f"/tmp/fedfleet-{number}")
    (folder / "logs").mkdir(parents=True)
    assert job.run(number, "CONFIG", "OUT", "rounds=7") == (0, "")
    common = (
        f"--temp-dir={folder} --num-gpus=0 --min-worker-port=0 --max-worker-port=0 "
        "--dashboard-agent-listen-port=0 --block --object-store-memory=314572800"
    )
    assert sorted(job.called("srun")) == [
        f"srun --overlap --cpus-per-task=4 --nodes=1 --ntasks=1 --nodelist=n1 ray start --head --node-ip-address={HEAD} "
        f"--port=20002 --num-cpus=3 --include-dashboard=false --disable-usage-stats {common}",
        "srun --overlap --cpus-per-task=4 --nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=n2,n3 --kill-on-bad-exit=0 "
        f"--wait=0 ray start --address={HEAD}:20002 --num-cpus=4 {common}",
        f"srun --overlap --ntasks-per-node=1 rm -rf {folder}",
    ]
    assert job.called("fedfleet") == [
        f"fedfleet run CONFIG executor.actors=11 rounds=7 executor.kind=ray executor.address={HEAD}:20002 --out OUT"
    ]
    assert not folder.exists()
    assert job.called("00") == ["0077", "0077"]
    assert not job.called("ray stop", "scontrol requeue")


def test_jobs_side_by_side_have_ports_folders_and_tokens_of_their_own(job: Job):
    job.run(6003, GRPC="0")
    job.run(6004, TAKEN="20008", GRPC="0")
    found = "\n".join(job.called("srun --overlap --cpus-per-task=4 --nodes=1"))
    assert re.findall(r"--(?:ray-client-server-)?port=(\d+)", found) == ["20006", "20007", "20010", "20011"]
    assert re.findall(r"--temp-dir=(\S+)", found) == ["/tmp/fedfleet-6003", "/tmp/fedfleet-6004"]
    starts = [line for line in job.called("srun") if "ray start" in line]
    assert len(starts) == 4
    assert all(options_in(line) <= options_of_ray_start() for line in starts)
    tokens = [line.split() for line in job.called("token")]
    assert {mode for _, mode, _ in tokens} == {"token"}
    assert len({token for _, _, token in tokens}) == 2
    assert all(re.fullmatch("[0-9a-f]{64}", token) for _, _, token in tokens)
    assert not any(token in line for _, _, token in tokens for line in job.called("srun", "ray", "fedfleet"))


def test_one_node_has_no_workers_elsewhere_and_gpus_are_told(job: Job):
    job.run(
        6005, SLURM_JOB_NODELIST="n1", SLURM_CPUS_PER_TASK="1", SLURM_GPUS_ON_NODE="4", FEDFLEET_HEAD_IP="198.51.100.7"
    )
    (start,) = [line for line in job.called("srun") if "ray start" in line]
    assert "--num-cpus=1 " in start
    assert "--num-gpus=4" in start
    assert "--node-ip-address=198.51.100.7" in start
    assert "executor.actors=1 " in job.called("fedfleet")[0]


def test_a_run_that_fails_leaves_the_logs_of_ray_and_its_status(job: Job):
    status, said = job.run(6006, RUN="1")
    assert (status, "logs are in /tmp/fedfleet-6006" in said) == (1, True)
    assert not any(" rm " in line for line in job.called("srun"))


@pytest.mark.parametrize("requeue", ["", "1"])
def test_a_job_out_of_time_writes_its_checkpoint_and_may_go_back_into_the_queue(job: Job, requeue: str):
    process = job.start(6007, RUN="wait", FEDFLEET_REQUEUE=requeue)
    until = time.monotonic() + 15
    while not job.seen.with_name("seen.up").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=15) == 143
    assert job.called("terminated") == ["terminated"]
    assert job.called("scontrol requeue") == (["scontrol requeue 6007"] if requeue else [])
    assert job.called("srun")[-1].endswith("rm -rf /tmp/fedfleet-6007")


def test_what_cannot_be_is_refused_before_anything_starts(subtests: pytest.Subtests, job: Job):
    for name, value, said in (
        ("TOKENS", "2", "install 2.52 or later"),
        ("ADDRESSES", "127.0.0.1", "set FEDFLEET_HEAD_IP"),
        ("SLURM_SUBMIT_DIR", "/", "submit from the repository"),
    ):
        with subtests.test(name):
            status, error = job.run(6008, **{name: value})
            assert (status, said in error) == (2, True)
            assert not job.called("srun")


def test_lines_for_sbatch_come_before_any_command_and_the_signal_goes_to_the_script():
    lines = BATCH.read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first:] if line.startswith("#SBATCH")]
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH"))
    assert options["signal"].startswith("B:TERM@")
    assert "requeue" in options
    assert options["ntasks-per-node"] == "1"


def test_the_shell_can_read_them():
    for script in (BATCH, GO):
        assert subprocess.run(["bash", "-n", script], capture_output=True, check=True).stderr == b""
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", "--severity=warning", script], check=True)


@pytest.fixture
def go(job: Job) -> Callable[..., str]:
    def call(*arguments: str) -> str:
        subprocess.run(["bash", str(GO), *arguments], env=job.environment, check=True)
        return job.called("fedfleet")[-1]

    return call


@pytest.mark.parametrize("there", ["config.yaml", "campaign.yaml"])
def test_a_run_that_is_there_goes_on_with_what_may_change(go: Callable[..., str], tmp_path: Path, there: str):
    out = tmp_path / "out"
    keys = [*MAY_CHANGE, "checkpoint.every_s"]
    given = [f"{key}=1" for key in keys]
    assert go("CONFIG", str(out), "cohort.size=5", *given).startswith(f"fedfleet run CONFIG cohort.size=5 {given[0]}")
    out.mkdir()
    (out / there).touch()
    assert go("CONFIG", str(out), "cohort.size=5", *given) == " ".join([f"fedfleet resume {out}", *given])
    assert go("CONFIG", str(out)) == f"fedfleet resume {out}"
    assert os.access(GO, os.X_OK)
