"""Every YAML composes, every documented command line parses, and ranks agree on one quiet run directory."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra", reason="needs hydra-core: install the extra 'recipes'")

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from recipes.bench import BenchConfig
from recipes.checks import check
from recipes.config import (
    CONF_DIR,
    GrpoJobConfig,
    JobConfig,
    PushJobConfig,
    RayJobConfig,
    RemoteJobConfig,
)
from recipes.launch import launch_time, quiet_other_ranks, register_configs
from recipes.moe_ep import MoeConfig

ROOT = CONF_DIR.parent
LAUNCHERS = ("torchrun", "python -m torch.distributed.run", "python -m recipes.")
SCHEMAS = {
    "train": JobConfig,
    "grpo": GrpoJobConfig,
    "sft": JobConfig,
    "push": PushJobConfig,
    "bench": BenchConfig,
    "http_one_gpu": JobConfig,
    "http_remote_trainer": RemoteJobConfig,
    "ray_one_gpu": RayJobConfig,
    "moe_ep": MoeConfig,
}


def _compose(overrides: list[str]) -> JobConfig:
    job = _compose_any("train", overrides)
    assert isinstance(job, JobConfig)
    return job


def _compose_any(name: str, overrides: list[str]) -> Any:
    """The settings of the recipe `recipes.NAME`, whose primary config has its name."""
    register_configs()
    ConfigStore.instance().store(name="bench_schema", node=BenchConfig)
    ConfigStore.instance().store(name="moe_schema", node=MoeConfig)
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        settings = OmegaConf.to_object(compose(name, overrides))
    assert type(settings) is SCHEMAS[name]
    if isinstance(settings, JobConfig):
        check(settings)
    return settings


def _compose_line(words: list[str]) -> None:
    module = next(index for index, word in enumerate(words) if word.startswith("recipes."))
    _compose_any(words[module].removeprefix("recipes."), words[module + 1 :])


def _command_lines(text: str) -> list[list[str]]:
    """The words of every documented launch of a recipe, with the comment or prompt in front taken off."""
    joined = text.replace("\\\n", " ")
    lines = (re.sub(r"^[#$>\s]+", "", line) for line in joined.splitlines())
    return [
        shlex.split(line, comments=True)
        for line in lines
        if line.startswith(LAUNCHERS) and "recipes." in line
    ]


@pytest.mark.parametrize("name", sorted(p.stem for p in (CONF_DIR / "model").glob("*.yaml")))
def test_every_model_composes(name: str) -> None:
    overrides = [f"model={name}"]
    if name == "checkpoint":
        with pytest.raises(ValueError, match=r"give a checkpoint \(model\.path="):
            _compose(overrides)
        overrides.append("model.path=some/where")
    job = _compose(overrides)
    assert job.model.path == ("some/where" if name == "checkpoint" else None)


@pytest.mark.parametrize("name", sorted(p.stem for p in (CONF_DIR / "experiment").glob("*.yaml")))
def test_every_experiment_composes(name: str) -> None:
    assert _compose([f"experiment={name}"]) != _compose([])


def test_every_yaml_is_of_a_kind_that_a_test_composes() -> None:
    seen = {str(path.relative_to(CONF_DIR).parent) for path in CONF_DIR.rglob("*.yaml")}
    assert seen == {".", "model", "experiment", "shape"}
    assert {path.stem for path in CONF_DIR.glob("*.yaml")} == set(SCHEMAS)


@pytest.mark.parametrize("name", sorted(p.stem for p in (CONF_DIR / "shape").glob("*.yaml")))
def test_every_shape_composes(name: str) -> None:
    _compose_any("bench", [f"shape={name}"])


@pytest.mark.parametrize(
    "path", sorted(CONF_DIR.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF_DIR))
)
def test_every_yaml_names_its_command_line(path: Path) -> None:
    header = "\n".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    lines = _command_lines(header)
    assert lines, f"no launch command in the header of {path}"
    for words in lines:
        _compose_line(words)


def test_field_F6_every_command_line_of_the_readme_parses() -> None:
    """https://github.com/hydra-ecosystem/hydra/issues/1577: quoting on the command line."""
    lines = _command_lines((ROOT / "README.md").read_text())
    assert lines, "the README names no launch of a recipe"
    for words in lines:
        _compose_line(words)


def test_the_makefile_launches_what_exists() -> None:
    text = (ROOT / "Makefile").read_text()
    launched = re.findall(r"torch\.distributed\.run .* -m (\S+) (.*)\$\(ARGS\)", text)
    assert {module for module, _ in launched} == {"recipes.train", "recipes.bench"}
    for module, overrides in launched:
        _compose_line([module, *shlex.split(overrides)])


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://some-host:80/base"])
def test_field_F6_a_url_needs_no_quotes(url: str) -> None:
    """https://github.com/hydra-ecosystem/hydra/issues/1577."""
    assert _compose([f"inference.url={url}"]).inference.url == url


def test_field_F9_a_url_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/omry/omegaconf/issues/634: `oc.decode` of a URL with a question mark fails."""
    monkeypatch.setenv("VLLM_URL", "http://127.0.0.1:8000/?a=b,c")
    assert _compose(["inference.url=${oc.env:VLLM_URL}"]).inference.url == "http://127.0.0.1:8000/?a=b,c"


def test_field_F7_no_omegaconf_object_gets_past_the_first_line() -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/issues/12201: DictConfig is no dict, ListConfig not JSON."""
    job = _compose(
        [
            "transfer.keep=[model.embed*,'*.norm.weight']",
            "inference.devices=[0,[1,2]]",
            "inference.extra_args=[--seed,3]",
        ]
    )
    values = asdict(job)
    assert json.loads(json.dumps(values)) == values
    _assert_plain(values)
    assert job.transfer.keep == ["model.embed*", "*.norm.weight"]
    assert type(job.inference.devices[1]) is list


def _assert_plain(value: Any) -> None:
    assert type(value) in (dict, list, str, int, float, bool, type(None)), type(value)
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _assert_plain(child)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("transfer.backend=nccl", "transfer.backend='nccl': expected one of auto, fsdp_ipc, ipc"),
        ("transfer.wire_dtype=int8", "transfer.wire_dtype"),
        ("train.steps=0", "train.steps=0"),
        ("hook.every=-1", "hook.every=-1"),
        ("transfer.bucket_mb=0", "transfer.bucket_mb"),
        ("inference.gpu_memory_utilization=1.5", "between 0 and 1"),
        ("model.num_key_value_heads=3", "multiple of"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _compose([override])


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


# A recipe without a model: what Hydra does on each rank is the same.
_RECIPE = """
import logging, os, sys, time
from pathlib import Path
import hydra
from hydra.utils import to_absolute_path
from recipes.bench import BenchConfig
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


def _torchrun(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(_RECIPE)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env.pop("HYDRA_FULL_ERROR", None)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "job.py",
        *args,
    ]
    return subprocess.run(
        launch, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("chdir", [False, True])
def test_field_F1_F3_one_run_directory_and_the_same_paths_for_late_ranks(tmp_path: Path, chdir: bool) -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/pull/18145, https://github.com/hydra-ecosystem/hydra/issues/922.

    Rank 1 reaches Hydra 1.3 s after rank 0. There is one directory, rank 0's log alone is in it, and a relative
    path means the place of the launch, whether or not Hydra changes directory.
    """
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


def test_field_C1_the_number_of_the_refusal_is_a_setting_of_the_recipes() -> None:
    """https://github.com/Azure/azureml-assets/pull/5288 : an error that names a setting which does not exist."""
    needed = 16384  # as in `test_plan`: "Set bucket_bytes=16384 or more"
    job = _compose([f"transfer.bucket_mb={needed / 2**20}"])
    assert job.transfer.bucket_mb is not None
    assert int(job.transfer.bucket_mb * 2**20) == needed
    assert _compose([]).transfer.bucket_mb is None  # left out, it is sized to the largest tensor
