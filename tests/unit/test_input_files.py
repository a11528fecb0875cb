# SPDX-License-Identifier: Apache-2.0
"""Local files that a run cannot use are refused before Ray starts, and those that it can pass."""

import json
import shutil
import subprocess
import sys

import pyarrow
import pytest
from omegaconf import OmegaConf
from pyarrow import parquet
from refusals import changed
from tiny_models import make
from tokenizers import Tokenizer, models, pre_tokenizers

from flashrl_verl import input_files
from flashrl_verl.errors import ConfigError
from flashrl_verl.input_files import check_files, check_what_is_there, missing_paths
from flashrl_verl.settings import ACTOR, CORRECTION, DATA, MODEL
from flashrl_verl.tools.recipe_process import ROOT

REWARD = "reward.custom_reward_function"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


def messages(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def row(prompt, **others) -> dict:
    return {"prompt": prompt, "data_source": "mine", "reward_model": {"style": "rule", "ground_truth": "4"}, **others}


def save(path, rows: list[dict]):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


@pytest.fixture
def run(tmp_path):
    """A configuration of files that will do, and their folder."""
    model = tmp_path / "model"
    make("qwen2.5").save_pretrained(model)
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    arguments = "data_source, solution_str, ground_truth"
    functions = {"own": f"{arguments}, extra_info=None", "any_more": f"{arguments}, **more", "of_two": "answer, truth"}
    functions |= {"lacks": arguments, "asks": f"{arguments}, extra_info, penalty"}
    lines = [f"def {name}({taken}):\n    return 1.0\n" for name, taken in functions.items()]
    (tmp_path / "reward.py").write_text("import math\nfrom math import floor as taken\n" + "".join(lines))
    settings = {
        DATA[0]: [
            save(tmp_path / "a.parquet", [row(messages("2 + 2"))] * 3),
            save(tmp_path / "b.parquet", [row(messages("2"))]),
        ],
        DATA[1]: save(tmp_path / "val.parquet", [row(messages("2 + 2"))]),
        "data.train_batch_size": 4,
        "data.max_prompt_length": 8,
        "data.max_response_length": 8,
        MODEL: str(model),
        f"{REWARD}.path": str(tmp_path / "reward.py"),
        f"{REWARD}.name": "own",
        "trainer.default_local_dir": str(tmp_path / "new" / "checkpoints"),
    }
    cfg = changed(settings)
    check_files(cfg)
    return cfg, tmp_path


def refused(cfg, **settings) -> str:
    for key, value in settings.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    with pytest.raises(ConfigError) as caught:
        check_files(cfg)
    assert " Remedy: " in str(caught.value) or "is no" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "0 rows are less than a batch of 4"),
        ([row(messages("2"))] * 3, "3 rows are less than a batch of 4"),
        ([row("2 + 2")] * 4, "its column prompt is text, and verl takes messages"),
        ([row(["2 + 2"])] * 4, "its column prompt is text, and verl takes messages"),
        ([{"question": "2 + 2"}] * 4, "it has no column prompt, reward_model, data_source, but question"),
        ([*[row(messages("2" * 30))] * 4, row(messages("a " * 9))], "has 9 tokens, and verl cuts"),
        ([row(messages("a " * 5) * 2), *[row(messages("2"))] * 4], "has 10 tokens, and verl cuts"),
        ([row(messages("2"), reward_model="4")] * 4, "the reward reads ground_truth in it"),
    ],
)
def test_data_that_will_not_do_is_refused(run, rows, said):
    cfg, folder = run
    table = pyarrow.Table.from_pylist(rows or [row(messages(""))]).slice(0, len(rows))
    parquet.write_table(table, folder / "c.parquet")
    (folder / "c.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name in ("c.parquet", *["c.jsonl"] * bool(rows)):
        assert said in refused(cfg, **{DATA[0]: str(folder / name), "data.filter_overlong_prompts": False})


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("val.parquet", POINTER, "pointer of Git LFS"),
        *(("val.parquet", content, "is no parquet file") for content in ("PAR1", "")),
        ("val.csv", "a", "verl reads .parquet"),
        ("", "", "verl always reads it"),
    ],
)
def test_a_file_that_is_no_data_is_refused(run, name, content, said):
    cfg, folder = run
    if name:
        (folder / name).write_text(content)
    assert said in refused(cfg, **{DATA[1]: str(folder / name) if name else None})
    assert "it is a folder. Remedy: its files" in refused(cfg, **{DATA[1]: str(folder)})
    assert refused(cfg, **{DATA[0]: str(folder)}).startswith(DATA[1]), "`flashrl eval` takes it for both"


def test_more_steps_than_the_data_have_are_refused_with_the_epochs_that_do(run):
    cfg, folder = run
    save(folder / "a.parquet", [row(messages("2"))] * 9)  # two batches of 4
    for key, value in ((DATA[0], str(folder / "a.parquet")), ("trainer.total_epochs", 3)):
        OmegaConf.update(cfg, key, value)
    assert "9 rows are 6 steps at most" in refused(cfg, **{"trainer.total_training_steps": 7})
    OmegaConf.update(cfg, "trainer.total_epochs", 4)
    check_files(cfg)
    assert "4 rows by data.train_max_samples are 4 steps at most" in refused(cfg, **{"data.train_max_samples": 4})
    assert "3 rows by data.train_max_samples are less than a batch" in refused(cfg, **{"data.train_max_samples": 3})


def test_a_row_may_be_larger_than_arrows_block(run):
    cfg, folder = run
    large = row(messages("2"), extra_info={"tests": "x" * 3_000_000})
    (folder / "large.jsonl").write_text("".join(f"{json.dumps(large)}\n" for _ in range(4)))
    OmegaConf.update(cfg, DATA[1], str(folder / "large.jsonl"))
    check_files(cfg)


def test_prompts_of_which_the_filter_leaves_none_are_refused(run):
    cfg, folder = run
    OmegaConf.update(cfg, "data.filter_overlong_prompts", True)
    save(folder / "a.parquet", [row(messages("a " * 9))] * 9)
    assert "1 rows within data.max_prompt_length=8 tokens are less than a batch of 4" in refused(cfg)
    save(folder / "a.parquet", [*[row(messages("a " * 9))] * 9, row(messages("2"))])  # not counted
    check_files(cfg)


def test_files_that_verl_cannot_put_together_are_refused(run):
    cfg, folder = run
    of_pandas = pyarrow.Table.from_pylist([row(messages("2"))] * 4)
    at, wide = of_pandas.column_names.index("data_source"), of_pandas["data_source"].cast(pyarrow.large_string())
    of_pandas = of_pandas.set_column(at, "data_source", wide)
    parquet.write_table(of_pandas, folder / "b.parquet")
    assert "the key data_source has unexpected type - Value('large_string')" in refused(cfg)
    save(folder / "b.parquet", [row(messages("2"), difficulty=3)])  # a column more becomes null
    check_files(cfg)


def test_a_data_source_that_is_known_or_of_files_that_are_not_judged_passes(run, tmp_path, monkeypatch):
    cfg, folder = run
    OmegaConf.update(cfg, f"{REWARD}.path", None)
    for name, source in (("a", "math_dapo"), ("b", "aime_of_1983")):
        save(folder / f"{name}.parquet", [row(messages("2"), data_source=source)] * 4)
    assert f"data_source='mine', which {DATA[1]} has" in refused(cfg)
    text = (input_files.verl_configs().parents[1] / "utils" / "reward_score" / "__init__.py").read_text()
    with monkeypatch.context() as fork:
        fork.setattr(input_files, "verl_configs", lambda: tmp_path / "trainer" / "config")
        (tmp_path / "utils" / "reward_score").mkdir(parents=True)
        for own in (
            "== 'mine':",
            "in ('mine',) or data_source is None:",
            "in sources.MINE:",
            "and TABLE[data_source]:",
        ):
            of_fork = text.replace('in ["hiyouga/geometry3k"]:', own)
            (tmp_path / "utils" / "reward_score" / "__init__.py").write_text(of_fork)
            check_files(cfg)
    OmegaConf.update(cfg, "trainer.val_before_train", False)
    OmegaConf.update(cfg, "trainer.test_freq", -1)
    check_files(cfg)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *(("taken", None), ("compute", "has no such function"), ("any_more", None), ("own(:", "is no Python: ")),
        *(("lacks", "it is lacks(data_source"), ("asks", "extra_info, penalty)"), ("of_two", "it is of_two(answer, ")),
    ],
)
def test_a_reward_is_looked_for_in_its_file_with_the_arguments_that_verl_gives(run, name, said):
    cfg, folder = run
    if "(" in name:
        (folder / "reward.py").write_text(f"def {name}")
    OmegaConf.update(cfg, f"{REWARD}.name", name)
    if said:
        assert said in refused(cfg)
    else:
        check_files(cfg)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["config.json"], "no config.json"),
        (["*.safetensors"], "no weights"),
        (["tokenizer.json", "tokenizer_config.json"], "has no tokenizer"),
        (["tokenizer_config.json"], "no chat template"),
    ],
)
def test_a_model_that_is_not_whole_is_refused(run, names, said):
    cfg, folder = run
    for name in names:
        for path in (folder / "model").glob(name):
            path.unlink()
    assert said in refused(cfg)


OWN_CODE = {"auto_map": {"AutoConfig": "own.Config"}}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "its weights are quantized"),
        ({"architectures": None}, "does not name one class under architectures"),
        ({**OWN_CODE, "model_type": "own"}, "also actor_rollout_ref.model.trust_remote_code=true"),
        (OWN_CODE, None),  # of a model that transformers has itself
        ({"max_position_embeddings": 15}, "it makes 16 tokens"),
        ({"max_position_embeddings": 15, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, None),
        ({"max_position_embeddings": 15, "rope_scaling": {"type": "yarn", "factor": 4.0}}, None),
        ({"max_position_embeddings": 15, "rope_parameters": {"full_attention": {"factor": 4.0}}}, None),
    ],
)
def test_what_config_json_says_of_a_model_is_looked_at(run, config, said):
    cfg, folder = run
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if said:
        assert said in refused(cfg)
    else:
        check_files(cfg)


def test_a_checkpoints_folder_an_adapter_and_missing_shards_are_refused(run):
    cfg, folder = run
    model, there = folder / "model", folder / "global_step_3" / "actor" / "huggingface"
    shutil.copytree(model, there)
    (there / "model.safetensors").unlink()
    assert "flashrl export" in refused(cfg, **{MODEL: str(there)})
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text("{")
    assert "model.safetensors.index.json is damaged" in refused(cfg, **{MODEL: str(model)})
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "the folder lacks model-00002-of-00002.safetensors" in refused(cfg)
    (model / "config.json").unlink()
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen2.5-7B"}))
    assert "is refused: it is a LoRA adapter. Remedy: Qwen/Qwen2.5-7B" in refused(cfg)
    OmegaConf.update(cfg, DATA[0], "/no/such.parquet")
    with pytest.raises(ConfigError, match="it is a LoRA adapter"):
        check_what_is_there(cfg)


def test_what_a_run_would_resume_from_is_looked_at(run):
    cfg, folder = run
    saved = folder / "new" / "checkpoints"
    step = saved / "global_step_3"
    (step / "actor").mkdir(parents=True)
    tracker = saved / "latest_checkpointed_iteration.txt"
    tracker.write_text("4")
    OmegaConf.update(cfg, "trainer.resume_mode", "auto")
    assert "the run would start from scratch" in refused(cfg)
    tracker.write_text("3")
    assert "has no weights of" in refused(cfg)
    ranks = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
    (step / "actor" / f"model_world_size_{ranks}_rank_0.pt").touch()
    check_files(cfg)
    (step / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
    check_files(cfg)
    for name, part in (("lr", "extra"), ("weight_decay", "optimizer")):
        other = OmegaConf.merge(cfg, OmegaConf.from_dotlist([f"{ACTOR}.optim.{name}=0.2"]))
        said, _, remedy = refused(other).rpartition(", or ")
        assert f"optim.{name}=0.2 is refused" in said and f"with '{part}' of" in said
        check_files(OmegaConf.merge(other, OmegaConf.from_dotlist([remedy.rstrip(".")])))
    moved = shutil.copytree(folder / "model", folder / "elsewhere" / "model")
    check_files(OmegaConf.merge(cfg, OmegaConf.from_dotlist([f"{MODEL}={moved}"])))
    shutil.copytree(folder / "model", folder / "other")
    for key, value in (
        *(("flashrl.precision", "bf16"), ("flashrl.kv_cache", "int8_per_token_head"), ("flashrl.rotation", "false")),
        *((MODEL, folder / "other"), (f"{CORRECTION}.rollout_is", "null"), (f"{CORRECTION}.rollout_rs", "seq_mean_k1")),
    ):
        other = OmegaConf.merge(cfg, OmegaConf.from_dotlist([f"{key}={value}"]))
        said, _, remedy = refused(other).partition("to go on all the same ")
        assert said.startswith(key) and f" is refused: {step} was saved with" in said
        check_files(OmegaConf.merge(other, OmegaConf.from_dotlist(remedy.rstrip(".").split())))
    assert "has as many steps already" in refused(cfg, **{"trainer.total_training_steps": 3})
    OmegaConf.update(cfg, "trainer.total_training_steps", None)
    assert f"4 rows are 3 steps, and {step} has as many already" in refused(cfg, **{"trainer.total_epochs": 3})
    OmegaConf.update(cfg, "trainer.total_training_steps", 3)
    OmegaConf.update(cfg, "trainer.val_only", True)
    check_files(cfg)
    OmegaConf.update(cfg, "trainer.total_training_steps", 4)
    assert "without its weights" in refused(cfg, **{f"{ACTOR}.checkpoint.load_contents": ["hf_model"]})
    shutil.rmtree(step / "actor")
    check_files(OmegaConf.merge(cfg, {"actor_rollout_ref": {"actor": {"checkpoint": {"load_contents": ["model"]}}}}))
    (saved / "global_step_4" / "actor").mkdir(parents=True)  # so verl has removed the other's
    OmegaConf.update(cfg, f"{ACTOR}.checkpoint.load_contents", ["model"])
    for mode, path in (("auto", None), ("resume_path", str(step))):
        OmegaConf.update(cfg, "trainer.resume_from_path", path)
        assert "verl removes those of all but the last" in refused(cfg, **{"trainer.resume_mode": mode})


def test_a_checkpoint_that_is_not_there_or_does_not_fit_is_refused(run, monkeypatch):
    cfg, folder = run
    key = "trainer.resume_from_path"
    assert f"{key}={folder}/global_step_9 not found" in refused(cfg, **{key: f"{folder}/global_step_9"})
    assert "no checkpoint of a step" in refused(cfg, **{key: str(folder)})
    OmegaConf.update(cfg, key, None)
    import flashrl_verl.input_files as files

    size = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
    contents = OmegaConf.select(cfg, f"{ACTOR}.checkpoint.save_contents")
    assert {"model", "optimizer"} <= {*contents}
    usage = files.shutil.disk_usage(folder)
    config = folder / "model" / "config.json"
    shape = json.loads(config.read_text())
    (folder / "model" / "consolidated.safetensors").write_bytes(bytes(size))  # as Mistral's: the same weights again
    # 12 bytes a parameter: of BF16 6 times what is there, of FP32 3.
    masters = f"{ACTOR}.fsdp_config.model_dtype"
    for free, dtype, fits in ((7, "bfloat16", True), (5, "bfloat16", False), (5, "float32", True), (2, "float32", 0)):
        config.write_text(json.dumps({**shape, "dtype": dtype}))
        monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage._replace(free=free * size))  # noqa: B023
        OmegaConf.update(cfg, "trainer.save_freq", 1)
        if fits:
            check_files(cfg)
        else:
            assert "a checkpoint takes" in refused(cfg)
    check_files(OmegaConf.merge(cfg, OmegaConf.from_dotlist([f"{masters}=bf16"])))  # half of it


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        *((name, False) for name in ("gpt2", "Qwen/Qwen2.5-32B", "hdfs://cluster/a/b", "there", "./there/model")),
        *((path, True) for path in ("/no/such", "./no", "../no/such", "~/no-such-model", "a/b/model", "there/no")),
    ],
)
def test_what_looks_like_a_path_has_to_exist_and_a_name_of_the_hub_has_not(tmp_path, monkeypatch, model, missing):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there" / "model").mkdir(parents=True)
    cfg = OmegaConf.create({"data": {"train_files": ["hdfs://a/b.parquet"]}})
    OmegaConf.update(cfg, MODEL, model, force_add=True)
    assert missing_paths(cfg) == [f"{MODEL}={model}"] * missing


def test_the_recipe_refuses_missing_paths_before_ray():
    words = ["experiment=quickstart", "quickstart.assets=/no/such"]
    command = [sys.executable, "-m", "recipe.flashrl.main_flashrl", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 1 and "flashrl quickstart" in done.stderr
    assert "ConfigError: data.train_files=/no/such/train.parquet, data.val_files=/no/such/test.parquet" in done.stderr
    assert "Ray" not in done.stdout + done.stderr and "Traceback" not in done.stderr
