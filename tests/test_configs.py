"""Every YAML composes, every documented command line parses, and what cannot work is refused by its name."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra", reason="needs hydra-core: install the extra 'recipes'")

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import OmegaConf

from recipes.bench_config import BenchConfig
from recipes.checks import check, check_here, check_length
from recipes.config import (
    CONF_DIR,
    DataConfig,
    GrpoJobConfig,
    JobConfig,
    ModelConfig,
    PushJobConfig,
    RayJobConfig,
    RemoteJobConfig,
    settings_in_use,
)
from recipes.launch import register_configs
from recipes.moe_ep import MoeConfig
from recipes.tasks import check_data

ROOT = CONF_DIR.parent
GROUPS = ("model", "mesh", "transfer", "inference", "optim", "data", "hook", "logger", "launcher")
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
    """The words of every documented launch of a recipe, with comment, prompt and variables in front taken off."""
    joined = re.sub(r"\\\n#?", " ", text)
    lines = (
        re.sub(r"^[#$>\s]+(?:[A-Z_]+=\S* )*|^(?:[A-Z_]+=\S* )+", "", line) for line in joined.splitlines()
    )
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
def test_every_experiment_changes_what_it_is_laid_over(name: str) -> None:
    where = ["model.path=some/where"] if name.startswith("node") else []
    job, plain = _compose_any("grpo", [f"experiment={name}", *where]), _compose_any("grpo", where)
    text = (CONF_DIR / "experiment" / f"{name}.yaml").read_text()
    changed: Any = OmegaConf.to_container(OmegaConf.create(text))
    for group, values in changed.items():
        if group != "defaults":
            found = vars(getattr(job, group))
            assert {key: found[key] for key in values} == values, f"{group} is overridden by what is below it"
    assert job != plain


def test_every_yaml_is_of_a_kind_that_a_test_composes() -> None:
    seen = {str(path.relative_to(CONF_DIR).parent) for path in CONF_DIR.rglob("*.yaml")}
    assert seen == {".", "experiment", "shape", *GROUPS}
    assert {path.stem for path in CONF_DIR.glob("*.yaml")} == set(SCHEMAS)


@pytest.mark.parametrize(
    "path",
    [path for group in GROUPS for path in sorted((CONF_DIR / group).glob("*.yaml"))],
    ids=lambda path: str(path.relative_to(CONF_DIR)),
)
def test_every_option_of_a_group_says_what_it_is_and_is_taken_as_it_stands(path: Path) -> None:
    options: Any = OmegaConf.to_container(OmegaConf.load(path))
    register_configs()
    group = path.parent.name
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        found = compose("grpo", [f"{group}={path.stem}"])[group]
    for key, value in options.items():
        # Laid over a schema, "???" would leave its value: nothing would be mandatory.
        assert value != "???"
        assert found[key] == value


def test_no_group_and_no_setting_is_without_use() -> None:
    """Each group is in some recipe's list, and each key is read by code that is no schema and no check."""
    lists = "".join(path.read_text() for path in CONF_DIR.glob("*.yaml"))
    for group in [*GROUPS, "experiment", "shape"]:
        assert re.search(rf"^  - {group}: ", lists, re.MULTILINE), group
    sources = [path for path in (ROOT / "recipes").glob("*.py") if path.stem not in ("config", "checks")]
    code = "".join(path.read_text() for path in sources)
    checks = (ROOT / "recipes" / "checks.py").read_text()
    for schema in {type(value) for value in vars(GrpoJobConfig()).values() if is_dataclass(value)}:
        for entry in fields(schema):
            if schema is ModelConfig and f'"{entry.name}"' in code:
                continue  # handed on by name
            # These two are answered for in checks.py, which the recipes call for it.
            if entry.name in ("url", "allow_remote") and f".{entry.name}" in checks:
                continue
            assert re.search(rf"\.{entry.name}\b", code), f"{schema.__name__}.{entry.name} is read nowhere"


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


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_field_F6_every_command_line_of_the_documentation_parses(page: Path) -> None:
    """https://github.com/hydra-ecosystem/hydra/issues/1577: quoting on the command line."""
    lines = [words for words in _command_lines(page.read_text()) if "…" not in words]
    assert lines or page.name != "README.md", "the README names no launch of a recipe"
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


@pytest.mark.parametrize(
    ("words", "setting", "value"),
    [
        ("""'inference.url="http://a/x?y=1"'""", "inference.url", "http://a/x?y=1"),
        ("""'inference.url="http://[::1]:8000"'""", "inference.url", "http://[::1]:8000"),
        ("""'data.prompt="say: {this}, [that] = $5"'""", "data.prompt", "say: {this}, [that] = $5"),
        ("""'model.path="12e4"'""", "model.path", "12e4"),
        (r"""'transfer.keep=["/^model\.norm/"]'""", "transfer.keep", [r"/^model\.norm/"]),
        ("inference.extra_args=[--attention-backend,TRITON_ATTN]", "inference.extra_args", ["--attention-backend", "TRITON_ATTN"]),
    ],
)  # fmt: skip
def test_field_F6_what_hydra_would_take_apart_goes_into_two_pairs_of_quotes(
    words: str, setting: str, value: Any
) -> None:
    """https://github.com/hydra-ecosystem/hydra/issues/1577: a shell takes the outer pair, Hydra the inner one."""
    found: Any = _compose(shlex.split(words))
    for name in setting.split("."):
        found = getattr(found, name)
    assert found == value


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


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("grpo", "+grpo.sample=3", "grpo.sample: no such setting; there are prompts, samples"),
        ("grpo", "mesh.tp=0", "mesh.tp=0: expected 1 or more"),
        ("grpo", "mesh.tp=3", "mesh.tp=3 must divide model.num_key_value_heads=2"),
        ("grpo", "mesh=fsdp_ep", "the model has no experts"),
        ("grpo", "mesh={dp_replicate:-1,dp_shard:-1}", "only one of dp_replicate and dp_shard"),
        ("grpo", "data=text", "data.kind='text': expected one of letters, sums, jsonl"),
        ("train", "data=letters", "data.kind='letters': expected one of text"),
        ("grpo", "grpo.samples=1", "grpo.samples=1: a group needs 2"),
        ("grpo", "hook.every=20", "grpo.max_staleness=8: with hook.every=20"),
        ("grpo", "hook={sleep_level:2,every:2}", "hook.sleep_level=2 drops"),
        ("grpo", "optim.betas=[0.9]", "optim.betas"),
        ("grpo", "optim.name=lion", "optim.name='lion': expected one of adamw, sgd"),
        ("grpo", "model.vocab_size=100", "model.vocab_size=100: the byte tokenizer has 257"),
        ("grpo", "inference.host=0.0.0.0", "can be reached from other machines"),
        (
            "grpo",
            "inference={host:0.0.0.0,allow_remote:true,backend:ipc}",
            "runs on the loopback interface only",
        ),
        ("grpo", "inference=external", "inference.url='': expected http://host:port"),
        ("grpo", "data=jsonl", "data.path: data.kind=jsonl needs the path"),
        ("push", "data.max_tokens=3", "model.path: this recipe needs the directory"),
        ("grpo", "inference.url=127.0.0.1:8000", "expected http://host:port"),
    ],
)
def test_what_cannot_work_together_is_refused_by_name(name: str, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        _compose_any(name, [override])


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        (
            "jsonl",
            None,
            "no such file; expected a file of JSON lines, each an object with 'prompt' and 'answer'",
        ),
        ("text", None, "no such file; expected a text file"),
        ("jsonl", "/", "a directory; expected a file of JSON lines"),
        ("text", "/", "a directory; expected a text file"),
        ("jsonl", b" \n\n", "no problems in it; expected a file of JSON lines"),
        ("text", b" \n", "nothing in it; expected a text file"),
        ("jsonl", b'{"prompt": "a", "answer": 1}\n\n{"prompt": "b"', "line 3: expected an object"),
        ("jsonl", b'{"prompt": "a", "answer": null}', "line 1: expected an object"),
        ("jsonl", b'{"prompt": "a", "answer": 1}\n\xff', "line 2: not UTF-8; expected a file of JSON lines"),
        ("text", b"a\nb\n\xff", "line 3: not UTF-8; expected a text file"),
        ("letters", b"a", "data.kind=letters reads no file"),
    ],
)
def test_a_file_that_cannot_be_learned_from_is_refused_by_its_name(
    kind: str, content: str | bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "data"
    if content == "/":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"data.path='{path}'") + ".*" + re.escape(message)):
        check_data(DataConfig(kind=kind, path=str(path)))


def test_a_file_that_can_be_learned_from_is_taken(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("words")
    check_data(DataConfig(kind="text", path=str(tmp_path / "text")))
    # What Windows puts in front, and a line separator that JSON allows inside of a text.
    (tmp_path / "jsonl").write_bytes('\ufeff{"prompt": "a\u2028b", "answer": 1}\r\n'.encode())
    check_data(DataConfig(kind="jsonl", path=str(tmp_path / "jsonl")))
    check_data(DataConfig(kind="letters"))


def test_a_report_shows_the_settings_that_its_recipe_reads() -> None:
    push = settings_in_use(_compose_any("push", ["model.path=a/b", "inference.url=http://127.0.0.1:1"]))
    assert push["model"] == {"path": "a/b"}
    assert push["data"] == {"max_tokens": 32}
    assert set(push["inference"]) == {"url", "start_timeout_s"}
    code = (ROOT / "recipes" / "push.py").read_text()
    assert set(re.findall(r"job\.(\w+)", code)) <= set(push), "what it reads is shown"
    assert not {"train", "optim", "complete"} & set(push)
    assert "every" not in push["hook"]
    grpo = settings_in_use(_compose_any("grpo", []))
    assert grpo["model"]["hidden_size"] > 0
    assert "num_experts_per_tok" not in grpo["model"]
    assert set(grpo["data"]) == {"kind", "prompt", "max_tokens"}
    assert grpo["train"].keys() == {"steps", "batch_size", "compute_dtype", "seed"}
    train = settings_in_use(_compose([]))
    assert {"path", "prompt"} <= set(train["data"])
    assert "every" in train["hook"]


def test_other_addresses_need_to_be_permitted() -> None:
    job = _compose_any("grpo", ["inference.host=0.0.0.0", "inference.allow_remote=true"])
    assert job.inference.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stepz=3", ["stepz", "TrainConfig"]),
        ("trian.steps=3", ["trian"]),
        ("train.steps=many", ["'many'", "Integer", "train.steps"]),
        ("hook.pause=perhaps", ["'perhaps'", "bool", "hook.pause"]),
        ("optim.lr=fast", ["'fast'", "Float", "optim.lr"]),
        ("mesh=fdsp", ["mesh/fdsp", "fsdp_tp"]),
    ],
)
def test_a_typo_or_a_wrong_type_is_told_with_its_key(override: str, words: list[str]) -> None:
    register_configs()
    with (
        pytest.raises((ConfigCompositionException, MissingConfigException)) as caught,
        initialize_config_dir(str(CONF_DIR), version_base="1.3"),
    ):
        compose("grpo", [override])
    told = f"{caught.value} {caught.value.__cause__}"
    for word in words:
        assert word in told, told


def test_a_typo_ends_the_job_before_anything_is_started(tmp_path: Path) -> None:
    """Here in a YAML file of one's own, which is laid over the schema as the others are."""
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text("learning_rate: 1.0\n")
    settings = [f"hydra.searchpath=[file://{tmp_path}]", "optim=mine", f"hydra.run.dir={tmp_path}/run"]
    done = subprocess.run(
        [sys.executable, "-m", "recipes.grpo", *settings],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "'learning_rate' not in 'OptimConfig'" in done.stderr
    assert not (tmp_path / "run").exists()


def test_field_C1_the_number_of_the_refusal_is_a_setting_of_the_recipes() -> None:
    """https://github.com/Azure/azureml-assets/pull/5288 : an error that names a setting which does not exist."""
    needed = 16384  # as in `test_plan`: "Set bucket_bytes=16384 or more"
    job = _compose([f"transfer.bucket_mb={needed / 2**20}"])
    assert job.transfer.bucket_mb is not None
    assert int(job.transfer.bucket_mb * 2**20) == needed
    assert _compose([]).transfer.bucket_mb is None  # left out, it is sized to the largest tensor


def test_what_this_machine_cannot_do_is_refused_by_the_settings_name(tmp_path: Path) -> None:
    stock = _compose(["transfer=stock", "inference=stock"])
    with pytest.raises(ValueError, match=r"transfer\.backend='ipc': .*CUDA memory only.*inference=colocated"):
        check_here(stock, has_gpu=False)
    check_here(stock, has_gpu=True)
    with pytest.raises(ValueError, match=r"inference\.backend='ipc'"):
        check_here(_compose(["inference=stock", "launcher.device=cpu"]), has_gpu=True)
    with pytest.raises(ValueError, match=r"launcher\.device='cuda': no CUDA GPU"):
        check_here(_compose(["launcher.device=cuda"]), has_gpu=False)
    check_here(_compose([]), has_gpu=False)
    job = PushJobConfig()
    job.model.path = str(tmp_path)
    with pytest.raises(ValueError, match=r"model\.path=.*no weights in it"):
        check_here(job, has_gpu=False)
    (tmp_path / "model.safetensors").touch()
    check_here(job, has_gpu=False)


def test_more_positions_than_a_checkpoint_has_are_refused_by_the_settings_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    job = PushJobConfig()
    job.model.path = str(tmp_path)
    with pytest.raises(ValueError, match=r"inference\.max_model_len=1024: .* has 512 positions"):
        check_length(job)
    job.inference.max_model_len = 512
    check_length(job)
    job.inference.max_model_len, job.inference.url = 1024, "http://127.0.0.1:1"
    check_length(job)  # a server that somebody else has started
