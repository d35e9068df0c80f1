"""Hydra under torchrun: one quiet run directory, the same paths on every rank, no sweeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.torchrun import launcher

pytest.importorskip("hydra", reason="needs hydra-core: install the extra 'recipes'")

from recipes.config import CONF_DIR
from recipes.launch import launch_time, quiet_other_ranks

ROOT = CONF_DIR.parent


def test_field_F1_other_ranks_write_no_hydra_files() -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/pull/5629: one directory a rank."""
    first, second = ["train.py"], ["train.py"]
    quiet_other_ranks(first, {"RANK": "0"})
    quiet_other_ranks(second, {"RANK": "1"})
    assert first == ["train.py"]
    assert "hydra.output_subdir=null" in second


def test_launch_time_is_that_of_the_parent_under_torchrun() -> None:
    first = launch_time({"TORCHELASTIC_RUN_ID": "none"})
    time.sleep(1.1)
    assert launch_time({"TORCHELASTIC_RUN_ID": "none"}) == first
    assert launch_time({}) > first or launch_time({})[:10] != first[:10]


@pytest.mark.parametrize(("run_id", "name"), [("job/1", "job_1"), ("none", "host0-29500")])
def test_the_ranks_of_several_nodes_name_one_directory(run_id: str, name: str) -> None:
    """Each node has a torchrun of its own, started at another time; the rendezvous' id is the same in all."""
    env = {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
    assert launch_time({**env, "TORCHELASTIC_RUN_ID": run_id}) == name


# A recipe without a model: what Hydra does on each rank is the same.
_RECIPE = """
import logging, os, sys, time
from pathlib import Path
import hydra
from hydra.utils import to_absolute_path
from recipes.bench_config import BenchConfig
from recipes.config import CONF_DIR, JobConfig
from recipes.launch import load, quiet_other_ranks, register_configs, run_dir
rank = os.environ.get("RANK", "0")
time.sleep(1.3 * int(rank))
@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="train")
def main(cfg):
    job = load(cfg, JobConfig)
    logging.getLogger("job").info("from rank %s", rank)
    Path(to_absolute_path(f"result-{rank}")).write_text(f"{run_dir()}\\n{job.data.path}\\n{os.getcwd()}")
register_configs()
quiet_other_ranks()
main()
"""


def _torchrun(folder: Path, *args: str, code: str = _RECIPE) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(code)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env.pop("HYDRA_FULL_ERROR", None)
    launch = [*launcher(2), "job.py", *args]
    return subprocess.run(
        launch, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("chdir", [False, True])
def test_field_F1_F3_one_run_directory_and_the_same_paths_for_late_ranks(tmp_path: Path, chdir: bool) -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/pull/18145, https://github.com/hydra-ecosystem/hydra/issues/922.

    Rank 1 reaches Hydra 1.3 s after rank 0. There is one directory, rank 0's log alone is in it, and a relative
    path means the place of the launch, whether or not Hydra changes directory.
    """
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "text").write_text("words")
    done = _torchrun(tmp_path, "data.path=some/text", f"hydra.job.chdir={chdir}")
    assert done.returncode == 0, done.stderr
    seen = [(tmp_path / f"result-{rank}").read_text().split("\n") for rank in (0, 1)]
    assert seen[0] == seen[1]
    assert seen[0][1] == str(tmp_path / "some/text")
    directory = Path(seen[0][0])
    assert [path.parent for path in tmp_path.rglob(".hydra")] == [directory]
    log = "\n".join(path.read_text() for path in directory.glob("*.log"))
    assert "from rank 0" in log
    assert "from rank 1" not in log
    assert list((tmp_path / "outputs" / "train").iterdir()) == [directory]


def test_field_F5_a_sweep_under_torchrun_is_refused(tmp_path: Path) -> None:
    """https://github.com/hydra-ecosystem/hydra/issues/951: the second job would share the first one's group."""
    done = _torchrun(tmp_path, "-m", "transfer.bucket_mb=32,64")
    assert done.returncode != 0
    assert "start torchrun once for each" in done.stderr
    assert not list(tmp_path.glob("result-*"))


def _refused(folder: Path, recipe: str, *settings: str) -> str:
    """What a recipe that is started alone says of its settings, all of it; nothing may have been started."""
    done = subprocess.run(
        [sys.executable, "-m", f"recipes.{recipe}", *settings, f"hydra.run.dir={folder / 'run'}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    assert not (folder / "run" / "server.log").exists()
    assert not (folder / "run" / "environment.json").exists(), "the job has begun"
    return done.stderr.strip()


@pytest.mark.parametrize("recipe", ["sft", "grpo"])
def test_a_file_that_is_not_there_is_told_in_one_line_before_anything_starts(
    recipe: str, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: install the extra 'recipes'")
    settings = ["data=jsonl"] if recipe == "grpo" else []
    expected = "a file of JSON lines" if recipe == "grpo" else "a text file"
    told = _refused(tmp_path, recipe, *settings, "data.path=/does/not/exist.jsonl")
    assert "\n" not in told
    assert told.startswith(f"{recipe}: data.path='/does/not/exist.jsonl': no such file; expected {expected}")


def test_a_malformed_line_is_told_by_its_number_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": 2}\n\n{"prompt": "1+2="}\n')
    told = _refused(tmp_path, "grpo", "data=jsonl", f"data.path={path}")
    assert told == (
        f"grpo: data.path='{path}', line 3: expected an object with 'prompt' and 'answer', got '{{\"prompt\": \"1+2=\"}}'"
    )


_FAILS = """
import os, sys
import hydra
from recipes.config import CONF_DIR, JobConfig
from recipes.launch import quiet_other_ranks, register_configs, start
def run(job, device, out):
    if os.environ["RANK"] == "1":
        raise LookupError("the words of the one that failed")
    import torch.distributed as dist
    dist.barrier()
@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="train")
def main(cfg):
    start(cfg, JobConfig, run)
register_configs()
quiet_other_ranks()
main()
"""


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.steps=2", "LookupError: the words of the one that failed"),
        ("train.steps=0", "ValueError: train.steps=0: must be greater than 0"),
    ],
)
def test_torchruns_last_words_have_the_error_itself(setting: str, words: str, tmp_path: Path) -> None:
    """Its own traceback used to be all that stood there, with a link to how one gets a better one."""
    done = _torchrun(tmp_path, setting, code=_FAILS)
    assert done.returncode == 1
    # Of errors in the same second it takes the first rank's for the root cause, and names the others above.
    summary = [line.strip() for line in done.stderr.rpartition("FAILED")[2].splitlines()]
    assert words in summary
    assert "To enable traceback see" not in done.stderr
    # One rank a node says it by itself, unless torchrun ends it before, for another's sake.
    assert done.stderr.count("job: train.steps=0: must") <= (setting == "train.steps=0")


def test_a_run_leaves_its_environment_when_it_begins(tmp_path: Path) -> None:
    """A job that dies has a report, too, and it must not tell of the machine that the report was written on."""
    _torchrun(tmp_path, "train.steps=2", "hydra.run.dir=run", code=_FAILS)
    kept = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert "steps: 2" in kept["config"]
    assert ["WORLD_SIZE", "2"] in kept["facts"]
