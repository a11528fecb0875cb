# SPDX-License-Identifier: Apache-2.0
"""What a run reads is opened before Ray starts, where it is on this machine: data, reward function, model, checkpoint.

verl finds out in a worker, minutes later, or not at all: prompts that are text instead of messages vanish from the
template, and prompts that are too long are cut from the left, whatever ``data.truncation`` says.
"""

import ast
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from flashrl_verl.errors import ConfigError, refuse
from flashrl_verl.settings import DATA, MODEL, ROLLOUT, get

_LOOKED_AT = 20_000
"""Rows of a file whose prompts are looked at."""
_LFS = b"version https://git-lfs"
_REWARD = "reward.custom_reward_function"
_CHECKPOINT = "actor_rollout_ref.actor.checkpoint"
_SAVED = {"model": 4, "optimizer": 8, "hf_model": 2}
"""Bytes a parameter of what a checkpoint holds: FP32 masters, two moments, BF16."""


def missing_paths(cfg: DictConfig) -> list[str]:
    """Local paths that a run would read and that are not there, as ``key=path``; data first."""
    root = Path.cwd()
    return [f"{key}={text}" for key, text in _paths(cfg, root) if not (root / text).exists()]


def check_files(cfg: DictConfig) -> None:
    """Refuse a configuration whose local files are not there, or not what the run needs.

    Raises:
        ConfigError: one message with every key and path that is missing; else the first file that will not do.
    """
    remedy = "paths that exist on every node (~ is not expanded in the model's); `flashrl data --help` lists data"
    missing, assets = missing_paths(cfg), get(cfg, "quickstart.assets")
    if assets is not None and all(assets in path for path in missing):
        remedy = "quickstart.assets=<folder>/assets of an earlier `flashrl quickstart --output <folder>`"
    if missing:
        here = f"not found on this machine (relative paths start at {Path.cwd()})"
        raise ConfigError(f"{', '.join(missing)} {here}. Remedy: {remedy}.")
    if not get(cfg, "data.custom_cls.path"):  # the user's own class reads what it likes
        for key in DATA:
            files = [Path(os.path.expanduser(text)) for text in _files(cfg, key)]
            if all(file.is_file() for file in files):
                _check_data(cfg, key, files)
    if (path := get(cfg, f"{_REWARD}.path")) and path.endswith(".py"):
        _check_reward(Path(path), get(cfg, f"{_REWARD}.name"))
    _check_model(cfg, Path(get(cfg, MODEL, "")))
    _check_checkpoints(cfg)
    _check_resume(cfg)


def model_config(cfg: DictConfig) -> dict[str, Any]:
    """The model's config.json. Empty where the model is on another machine or on the hub, and where the file is missing
    or damaged, which have messages of their own."""
    return _json(Path(get(cfg, MODEL, "")) / "config.json")


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _files(cfg: DictConfig, key: str) -> list[str]:
    files = get(cfg, key, []) or []
    return [files] if isinstance(files, str) else files


def _paths(cfg: DictConfig, root: Path) -> Iterator[tuple[str, str]]:
    for key in () if get(cfg, "data.custom_cls.path") else DATA:
        yield from ((key, os.path.expanduser(text)) for text in _files(cfg, key) if "://" not in text)
    others = (f"{_REWARD}.path", "data.custom_cls.path", "trainer.resume_from_path")
    yield from ((key, text) for key in others if (text := get(cfg, key)) and "://" not in text)  # hdfs://, pkg://
    model = get(cfg, MODEL, "")
    of_two = len(Path(model).parts) == 2  # as names of the model hub are; others of them have one
    starts = model.startswith(("/", "./", "../", "~"))  # transformers takes ~ for a folder's name
    if "://" not in model and (starts or len(Path(model).parts) > 2 or (of_two and (root / model).parent.is_dir())):
        yield MODEL, model


def _check_data(cfg: DictConfig, key: str, files: list[Path]) -> None:
    prompt, remedy, rows = get(cfg, "data.prompt_key", "prompt"), "`flashrl data --help` makes such files", 0
    own_manager = get(cfg, "reward.reward_manager.source", "register") != "register"
    needed = [prompt] if own_manager else [prompt, "reward_model", "data_source"]
    if not files:
        refuse(key, None, "verl always reads it", "a file; trainer.test_freq=-1 leaves that of val_files unused")
    for file in files:
        if file.open("rb").read(len(_LFS)) == _LFS:
            refuse(key, str(file), "it is a pointer of Git LFS, not the file", f"`git lfs pull` in {file.parent}")
        if file.suffix not in (".parquet", ".jsonl", ".json"):
            refuse(key, str(file), "verl reads .parquet, .jsonl and .json", remedy)
        if file.suffix == ".json":
            rows += 1 << 60  # as many as it may have: it may be one object a line, or a list
            continue
        count, names, messages, longest = _prompts(key, file, prompt, own_manager)
        rows += count
        if absent := [name for name in needed if name not in names]:
            refuse(key, str(file), f"it has no column {', '.join(absent)}, but {', '.join(names)}", remedy)
        if not messages:
            refuse(key, str(file), f"its column {prompt} is text, and verl takes messages of role and content", remedy)
        limit, filtered = get(cfg, "data.max_prompt_length"), get(cfg, "data.filter_overlong_prompts")
        if not filtered and (tokens := _tokens(cfg, longest)) > limit:
            reason = f"a prompt of {file} has {tokens} tokens, and verl cuts longer ones from the left without an error"
            refuse("data.max_prompt_length", limit, reason, "a larger one, or data.filter_overlong_prompts=true")
    batch = get(cfg, "data.train_batch_size") if key == DATA[0] else 1
    if rows < batch:
        refuse(key, ", ".join(map(str, files)), f"{rows} rows are less than a batch of {batch}", "more data")


def _prompts(key: str, file: Path, column: str, own_manager: bool) -> tuple[int, list[str], bool, str]:
    """Rows, names of columns, whether prompts are messages, and the text of the longest."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import compute, parquet
    from pyarrow import json as json_lines

    try:
        if file.suffix == ".jsonl":
            table = json_lines.read_json(file)
            schema, count = table.schema, len(table)
        else:
            opened = parquet.ParquetFile(file)
            schema, count = opened.schema_arrow, opened.metadata.num_rows
        if column not in schema.names or not count:
            return count, schema.names, True, ""
        if not pa.types.is_list(schema.field(column).type) and not pa.types.is_large_list(schema.field(column).type):
            return count, schema.names, False, ""
        if file.suffix == ".jsonl":
            prompts = table.column(column).combine_chunks()
        else:
            prompts = next(opened.iter_batches(_LOOKED_AT, columns=[column])).column(0)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{key}={file} is no {file.suffix[1:]} file: {' '.join(str(error).split())}") from error
    if "reward_model" in schema.names and not own_manager:
        held = schema.field("reward_model").type
        if not pa.types.is_struct(held) or "ground_truth" not in [field.name for field in held]:
            reason = f"its column reward_model is {held}, and the reward reads ground_truth in it"
            refuse(key, str(file), reason, "`flashrl data --help` makes such files")
    item = prompts.type.value_type
    if not pa.types.is_struct(item) or not {"role", "content"} <= {field.name for field in item}:
        return count, schema.names, False, ""
    texts = compute.struct_field(prompts.flatten(), "content")
    if not pa.types.is_string(texts.type) or not len(texts):  # parts of text and pictures
        return count, schema.names, True, ""
    lengths, ends = compute.fill_null(compute.utf8_length(texts), 0).to_numpy(), prompts.offsets.to_numpy()
    ends = ends - ends[0]
    of_prompts = np.add.reduceat(np.append(lengths, 0), ends[:-1]) * (np.diff(ends) > 0)
    at = int(of_prompts.argmax())  # all messages of a conversation
    return count, schema.names, True, " ".join(text or "" for text in texts[ends[at] : ends[at + 1]].to_pylist())


def _tokens(cfg: DictConfig, text: str) -> int:
    """Of a text, without the template around it; 0 where the tokenizer is elsewhere."""
    file = Path(get(cfg, "actor_rollout_ref.model.tokenizer_path") or get(cfg, MODEL, "")) / "tokenizer.json"
    if not file.is_file():
        return 0
    from tokenizers import Tokenizer

    return len(Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False))


def _check_reward(path: Path, name: str) -> None:
    text = path.read_text()
    try:
        ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{_REWARD}.path={path} is no Python: {error}") from error
    if not re.search(rf"\b{re.escape(str(name))}\b|import \*", text):
        functions = re.findall(r"^(?:async )?def (\w+)", text, re.M)
        refuse(f"{_REWARD}.name", name, f"{path} has no such function", " or ".join(functions) or "a function in it")


def _check_model(cfg: DictConfig, model: Path) -> None:
    if not model.is_dir():
        return
    if not model_config(cfg):
        refuse(MODEL, str(model), "the folder has no config.json", "a folder in Hugging Face's format")
    if "quantization_config" in model_config(cfg):
        refuse(MODEL, str(model), "its weights are quantized, and are trained in BF16", "the model that it was made of")
    if any(path.name == "huggingface" and path.parent.name == "actor" for path in (model, model.resolve())):
        if not [*model.glob("*.safetensors")]:
            remedy = f"the folder that `flashrl export {model.parent.parent} --format bf16 --output <folder>` makes"
            refuse(MODEL, str(model), "a checkpoint's folder has no weights", remedy)
    weights = [path for ending in ("*.safetensors", "*.bin") for path in model.glob(ending)]
    if not weights:
        refuse(MODEL, str(model), "the folder has no weights (*.safetensors)", "the whole download")
    for path in weights:
        if path.open("rb").read(len(_LFS)) == _LFS:
            refuse(MODEL, str(model), f"{path.name} is a pointer of Git LFS", f"`git lfs pull` in {model}")
    tokenizer = Path(get(cfg, "actor_rollout_ref.model.tokenizer_path") or model)
    if tokenizer.is_dir():
        files = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
        if not any((tokenizer / name).is_file() for name in files):
            refuse(MODEL, str(model), f"{tokenizer} has no tokenizer", "the whole download, or its tokenizer_path")
        key = "actor_rollout_ref.model.custom_chat_template"
        own = get(cfg, key) or _json(tokenizer / "tokenizer_config.json").get("chat_template")
        if not own and not any(tokenizer.glob("chat_template*")) and not any(tokenizer.glob("additional_chat*")):
            refuse(MODEL, str(model), "its tokenizer has no chat template, and prompts are messages", f"{key}=<Jinja>")
    config = model_config(cfg)
    config = config.get("text_config", config)
    longest = sum(get(cfg, f"{ROLLOUT}.{name}") for name in ("prompt_length", "response_length"))
    positions, scaled = (
        config.get("max_position_embeddings"),
        config.get("rope_scaling") or config.get("rope_parameters"),
    )
    if isinstance(positions, int) and longest > positions and (scaled or {}).get("rope_type", "default") == "default":
        reason = f"with prompts it makes {longest} tokens, and {model} has {positions} positions"
        refuse("data.max_response_length", get(cfg, f"{ROLLOUT}.response_length"), reason, "less, or a longer model")


def _check_resume(cfg: DictConfig) -> None:
    """What verl would resume from, if that is on this machine."""
    mode, folder = get(cfg, "trainer.resume_mode"), Path(get(cfg, "trainer.default_local_dir", "."))
    tracker = folder / "latest_checkpointed_iteration.txt"
    if mode == "auto" and tracker.is_file():
        step = tracker.read_text().strip()
        found = folder / f"global_step_{step}"
        if not step.isdecimal() or not found.is_dir():
            reason = f"{tracker} says {step!r}, and there is no such checkpoint: the run would start from scratch"
            refuse("trainer.resume_mode", mode, reason, f"disable, or remove {tracker}")
    elif mode == "resume_path" and (path := get(cfg, "trainer.resume_from_path")) and Path(path).is_dir():
        found = Path(path)
    else:
        return
    contents = get(cfg, f"{_CHECKPOINT}.load_contents", [])
    if "model" not in contents:
        reason = f"{found} would be resumed from without its weights"
        refuse(
            f"{_CHECKPOINT}.load_contents", contents, reason, "[model,optimizer,extra], or trainer.resume_mode=disable"
        )
    ranks = get(cfg, "trainer.nnodes") * get(cfg, "trainer.n_gpus_per_node")
    if (found / "actor").is_dir() and not (found / "actor" / f"model_world_size_{ranks}_rank_0.pt").is_file():
        reason = f"{found} was not saved whole by {ranks} ranks"
        refuse("trainer.resume_mode", mode, reason, "as many GPUs as saved it, an earlier checkpoint, or disable")
    last, step = get(cfg, "trainer.total_training_steps"), found.name.removeprefix("global_step_")
    if last is not None and step.isdecimal() and int(step) >= last:
        refuse("trainer.total_training_steps", last, f"{found} has as many steps already", f"more than {step}")


def _check_checkpoints(cfg: DictConfig) -> None:
    if (path := get(cfg, "trainer.resume_from_path")) and "global_step_" not in path:
        refuse("trainer.resume_from_path", path, "it is no checkpoint of a step", "<run>/global_step_<n>")
    model, folder = Path(get(cfg, MODEL, "")), Path(get(cfg, "trainer.default_local_dir", "."))
    if get(cfg, "trainer.save_freq", -1) <= 0 or not model.is_dir() or "://" in str(folder):
        return
    contents = get(cfg, f"{_CHECKPOINT}.save_contents", [])
    parameters = sum(path.stat().st_size for path in model.glob("*.safetensors")) / 2  # in BF16
    needed = parameters * sum(_SAVED.get(name, 0) for name in contents) / get(cfg, "trainer.nnodes")
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if needed > (free := shutil.disk_usage(there).free):
        reason = f"a checkpoint takes {needed / 1e9:.0f} GB of each node, and {there} has {free / 1e9:.0f} GB"
        refuse("trainer.default_local_dir", str(folder), reason, "another folder, or trainer.save_freq=-1")
