# SPDX-License-Identifier: Apache-2.0
"""What a run reads is opened before Ray starts, where it is on this machine: data, reward function, model, checkpoint.

verl finds out minutes later, or not at all: prompts that are text instead of messages vanish from the
template, and prompts that are too long are cut from the left, whatever ``data.truncation`` says.
"""

import ast
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf

from flashrl_verl.errors import ConfigError, listed, refuse, words
from flashrl_verl.settings import ACTOR, CORRECTION, DATA, MODEL, ROLLOUT, get, has_critic
from flashrl_verl.upstream.versions import verl_configs

_LOOKED_AT, _LONGEST = 20_000, 32
"""Rows of a file whose prompts are looked at, and those of them whose tokens are counted."""
_LFS = b"version https://git-lfs"
_REWARD = "reward.custom_reward_function"
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""By which verl's reward managers call a function."""
_CHECKPOINT = f"{ACTOR}.checkpoint"
_RESTORED = {"lr": "extra", "weight_decay": "optimizer", "betas": "optimizer"}
"""Settings of the optimizer that a checkpoint brings with it, and in which part."""
_IDENTITY = (
    *(MODEL, *(f"flashrl.{name}" for name in ("precision", "rotation", "kv_cache", "ignore", "fp32_lm_head"))),
    *(f"{CORRECTION}.{name}" for name in ("rollout_is", "rollout_is_threshold", "rollout_rs", "bypass_mode")),
)
"""With another value of one of these it is another run."""
OF_MISSING = "paths that exist on every node (~ is not expanded in the model's); `flashrl data --help` lists data"
"""Remedy."""
LATEST = "latest_checkpointed_iteration.txt"
"""verl's record of the last whole checkpoint, in trainer.default_local_dir."""
INDEX = "model.safetensors.index.json"
_SAVED = {"model": 4, "optimizer": 8, "hf_model": 2}
"""Bytes a parameter of what a checkpoint holds: FP32 masters, two moments, BF16."""


def missing_paths(cfg: DictConfig) -> list[str]:
    """Local paths that a run would read and that are not there, as ``key=path``; data first, and each path once."""
    keys = {text: key for key, text in _paths(cfg)}
    return [f"{key}={text}" for text, key in keys.items() if not Path(text).exists()]


def check_files(cfg: DictConfig) -> None:
    """Refuse a configuration whose local files are not there, or not what the run needs.

    Raises:
        ConfigError: one message with every key and path that is missing; else the first file that will not do.
    """
    remedy = OF_MISSING
    missing, assets = missing_paths(cfg), get(cfg, "quickstart.assets")
    if assets is not None and all(assets in path for path in missing):
        remedy = "quickstart.assets=<folder>/assets of an earlier `flashrl quickstart --output <folder>`"
    if missing:
        here = f"not found on this machine (relative paths start at {Path.cwd()})"
        raise ConfigError(f"{', '.join(missing)} {here}. Remedy: {remedy}.")
    check_what_is_there(cfg)


def check_what_is_there(cfg: DictConfig) -> None:
    """``check_files`` of a machine that need not have all of them.

    Raises:
        ConfigError: the first file that will not do.
    """
    if not get(cfg, "data.custom_cls.path"):  # the user's own class reads what it likes
        for key in reversed(DATA):  # `flashrl eval` takes the second for the first
            files = [Path(os.path.expanduser(text)) for text in _files(cfg, key)]
            if folders := [str(file) for file in files if file.is_dir()]:
                refuse(key, folders[0], "it is a folder", "its files: one, or [first,second]")
            if all(file.is_file() for file in files):
                _check_data(cfg, key, files)
    if (path := get(cfg, f"{_REWARD}.path")) and path.endswith(".py") and Path(path).is_file():
        _check_reward(cfg, Path(path), str(get(cfg, f"{_REWARD}.name")))
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


def _paths(cfg: DictConfig) -> Iterator[tuple[str, str]]:
    for key in () if get(cfg, "data.custom_cls.path") else DATA:
        yield from ((key, os.path.expanduser(text)) for text in _files(cfg, key) if "://" not in text)
    others = (f"{_REWARD}.path", "data.custom_cls.path", "trainer.resume_from_path")
    yield from ((key, text) for key in others if (text := get(cfg, key)) and "://" not in text)  # hdfs://, pkg://
    for key in (MODEL, *["critic.model.path"] * has_critic(cfg)):
        model = get(cfg, key, "")
        of_two = len(Path(model).parts) == 2  # as names of the model hub are; others of them have one
        starts = model.startswith(("/", "./", "../", "~"))  # transformers takes ~ for a folder's name
        if "://" not in model and (starts or len(Path(model).parts) > 2 or (of_two and Path(model).parent.is_dir())):
            yield key, model


def _check_data(cfg: DictConfig, key: str, files: list[Path]) -> None:
    prompt, remedy = get(cfg, "data.prompt_key", "prompt"), "`flashrl data` makes such files"
    limit, filtered = get(cfg, "data.max_prompt_length"), get(cfg, "data.filter_overlong_prompts")
    own_manager = get(cfg, "reward.reward_manager.source", "register") != "register"
    needed = [prompt] if own_manager else [prompt, "reward_model", "data_source"]
    tokens, rows, schemas = _tokens(cfg), 0, []
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
        schema, count, first = _read(key, file, (prompt, "data_source"))
        if absent := [name for name in needed if name not in schema.names]:
            refuse(key, str(file), f"it has no column {', '.join(absent)}, but {', '.join(schema.names)}", remedy)
        if not count:
            continue
        if not {"role", "content"} <= _fields(getattr(schema.field(prompt).type, "value_type", None)):
            refuse(key, str(file), f"its column {prompt} is text, and verl takes messages of role and content", remedy)
        if not own_manager:
            if "ground_truth" not in _fields(held := schema.field("reward_model").type):
                reason = f"its column reward_model is {held}, and the reward reads ground_truth in it"
                refuse(key, str(file), reason, remedy)
            _check_sources(cfg, key, {str(row["data_source"]) for row in first})
        texts = [_text(row[prompt]) for row in first]
        longest = sorted(texts, key=lambda text: len(text.encode()))[-_LONGEST:]  # rare characters are more tokens
        if not filtered and (most := max(map(tokens, longest))) > limit:
            reason = f"a prompt of {file} has {most} tokens, and verl cuts longer ones from the left without an error"
            refuse("data.max_prompt_length", limit, reason, "a larger one, or data.filter_overlong_prompts=true")
        fits = not filtered or count > len(texts) or any(tokens(text) <= limit for text in texts)
        rows, schemas = rows + count * fits, [*schemas, schema]
    batch, all_files = get(cfg, "data.train_batch_size") if key == DATA[0] else 1, ", ".join(map(str, files))
    by = ""
    if 0 < (kept := get(cfg, samples := key.replace("files", "max_samples"), -1)) < rows:
        rows, by = kept, f" by {samples}"
    if rows < batch:
        of = f" within data.max_prompt_length={limit} tokens" if filtered else ""
        refuse(key, all_files, f"{rows} rows{by}{of} are less than a batch of {batch}", "more data")
    if key == DATA[0] and not get(cfg, "trainer.val_only"):
        epochs, steps = get(cfg, "trainer.total_epochs", 1), get(cfg, "trainer.total_training_steps")
        most, done = epochs * (rows // batch), resumes_from(cfg)
        if steps is not None and steps > most:
            reason = f"{rows} rows{by} are {most} steps at most, and verl would end there without a last checkpoint"
            refuse("trainer.total_epochs", epochs, reason, f"{-(-steps // (rows // batch))} or more")
        if done and _step(done) >= most:
            reason = f"{rows} rows{by} are {most} steps, and {done} has as many already"
            refuse("trainer.total_epochs", epochs, reason, "more, or another trainer.default_local_dir")
    if len(schemas) > 1:
        _check_together(key, all_files, schemas)


def _read(key: str, file: Path, columns: Iterable[str]) -> tuple[Any, int, list[dict[str, Any]]]:
    """Arrow's schema, the number of rows, and of the first ones those of the columns that there are."""
    from pyarrow import ArrowException, json, parquet

    try:
        if file.suffix == ".jsonl":
            # A block holds at least a row: those of code tasks bring their tests.
            table = json.read_json(file, json.ReadOptions(block_size=1 << 28))
            return table.schema, len(table), table.slice(0, _LOOKED_AT).to_pylist()
        opened = parquet.ParquetFile(file)
        there = [name for name in columns if name in opened.schema_arrow.names]
        first = next(opened.iter_batches(_LOOKED_AT, columns=there), None)
        return opened.schema_arrow, opened.metadata.num_rows, first.to_pylist() if first else []
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{key}={file} is no {file.suffix[1:]} file: {' '.join(str(error).split())}") from error


def _text(messages: list[dict[str, Any] | None] | None) -> str:
    """Of a conversation; content in parts is not counted."""
    return " ".join(one["content"] for one in messages or () if one and isinstance(one["content"], str))


def _fields(kind: Any) -> set[str]:
    """Of Arrow's type, if it is a structure."""
    from pyarrow import types

    return {field.name for field in kind} if kind is not None and types.is_struct(kind) else set()


def _check_sources(cfg: DictConfig, key: str, sources: set[str]) -> None:
    """Values of ``data_source`` against verl's rewards, by their source text: to import verl settles its platform."""
    own = get(cfg, f"{_REWARD}.path") or get(cfg, "reward.reward_model.enable")
    if own or (key == DATA[1] and get(cfg, "trainer.test_freq") <= 0 and not get(cfg, "trainer.val_before_train")):
        return
    text = (verl_configs().parents[1] / "utils" / "reward_score" / "__init__.py").read_text()
    if re.search(r"data_source (==|in) [A-Za-z_]|\[data_source\]|\.get\(data_source", text):
        return  # a fork's own table: not known until it runs
    known = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    beginnings = re.findall(r"""data_source\.startswith\(['"](\w+)""", text)
    for source in sorted(sources):
        if source not in known and not source.startswith(tuple(beginnings)):
            reason = f"no reward of verl's knows data_source={source!r}, which {key} has"
            refuse(f"{_REWARD}.path", None, reason, "a file with a reward function of your own, and its name")


def _check_together(key: str, files: str, schemas: list[Any]) -> None:
    """verl concatenates them."""
    from datasets import Dataset, Features, concatenate_datasets

    features = [Features.from_arrow_schema(schema) for schema in schemas]
    try:
        concatenate_datasets([Dataset.from_dict({name: [None] for name in each}, each) for each in features])
    except ValueError as error:
        reason = "their columns differ: " + re.sub(r" of features \{.*\} has", " has", str(error).rstrip("."))
        refuse(key, files, reason, "files whose columns have the same types")


def _tokens(cfg: DictConfig) -> Callable[[str], int]:
    """How many a text has, without the template around it; 0 where the tokenizer is elsewhere."""
    file = Path(get(cfg, "actor_rollout_ref.model.tokenizer_path") or get(cfg, MODEL, "")) / "tokenizer.json"
    if not file.is_file():
        return lambda text: 0
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def _check_reward(cfg: DictConfig, path: Path, name: str) -> None:
    text = path.read_text()
    try:
        functions = {node.name: node for node in ast.parse(text).body if hasattr(node, "args")}
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{_REWARD}.path={path} is no Python: {error}") from error
    if not re.search(rf"\b{re.escape(name)}\b|import \*", text):
        refuse(f"{_REWARD}.name", name, f"{path} has no such function", " or ".join(functions) or "a function in it")
    others_call = get(cfg, "reward.reward_model.enable") or get(cfg, "reward.reward_manager.source") == "importlib"
    if others_call or name not in functions or functions[name].decorator_list:
        return
    taken = functions[name].args
    positional, keywords = [arg.arg for arg in taken.args], [arg.arg for arg in taken.kwonlyargs]
    needed = {arg.arg for arg in taken.posonlyargs} | {*positional[: len(positional) - len(taken.defaults)]}
    needed |= {arg for arg, default in zip(keywords, taken.kw_defaults, strict=True) if default is None}
    given = {*_ARGUMENTS, *get(cfg, f"{_REWARD}.reward_kwargs", {})}
    lacking = given - {*positional, *keywords} if taken.kwarg is None else set()
    if lacking or needed - given:
        reason = f"verl calls it with {', '.join(_ARGUMENTS)} by name, and it is {name}({ast.unparse(taken)})"
        refuse(f"{_REWARD}.name", name, reason, f"def {name}({', '.join(_ARGUMENTS)}, **kwargs)")


def weight_files(model: Path) -> list[Path]:
    """Of the index, or ``model.safetensors``, or all ``*.safetensors`` where there is neither.

    Others beside ``model.safetensors`` or an index are the same model in other names, such as Mistral's
    ``consolidated.safetensors``; transformers does not read them either.

    Raises:
        ConfigError: the index is damaged.
    """
    if (model / INDEX).is_file():
        if not (names := _json(model / INDEX).get("weight_map")):
            raise ConfigError(f"{model / INDEX} is damaged: it names no weights. Remedy: copy it again.")
        return [model / name for name in sorted({*names.values()})]
    single = model / "model.safetensors"
    return [single] if single.is_file() else sorted(model.glob("*.safetensors"))


def _check_model(cfg: DictConfig, model: Path) -> None:
    if not model.is_dir():
        return
    whole, node, config = "the whole download", MODEL.removesuffix(".path"), model_config(cfg)

    def refuse_model(reason: str, remedy: str) -> NoReturn:
        refuse(MODEL, str(model), reason, remedy)

    weights = {path.name: path for ending in ("*.safetensors", "*.bin") for path in model.glob(ending)}
    if (model / "adapter_config.json").is_file() and not config:
        base = _json(model / "adapter_config.json").get("base_model_name_or_path", "<its base model>")
        refuse_model("it is a LoRA adapter", f"{base}, or both merged (merge_and_unload of peft)")
    if not config:
        refuse_model("the folder has no config.json", "a folder in Hugging Face's format")
    if "quantization_config" in config:
        refuse_model("its weights are quantized, and are trained in BF16", "the model that it was made of")
    if len(config.get("architectures") or ()) != 1:
        reason = "its config.json does not name one class under architectures, which verl and vLLM go by"
        refuse_model(reason, 'the original config.json, or one with such as "architectures": ["Qwen2ForCausalLM"]')
    if "auto_map" in config and not any(get(cfg, f"{node}.{name}") for name in ("trust_remote_code", "external_lib")):
        from transformers import CONFIG_MAPPING  # which takes seconds

        if config.get("model_type") not in CONFIG_MAPPING:
            refuse_model("its code comes with it, and is not to be trusted", f"also {node}.trust_remote_code=true")
    if not weights and any(path.parts[-2:] == ("actor", "huggingface") for path in (model, model.resolve())):
        remedy = f"the folder that `flashrl export {model.parent.parent} --format bf16 --output <folder>` makes"
        refuse_model("a checkpoint's folder has no weights", remedy)
    if not weights:
        refuse_model("the folder has no weights (*.safetensors)", whole)
    if absent := {path.name for path in weight_files(model)} - weights.keys():
        refuse_model(f"the folder lacks {listed(sorted(absent))} of its {INDEX}", whole)
    for name, path in weights.items():
        if path.open("rb").read(len(_LFS)) == _LFS:
            refuse_model(f"{name} is a pointer of Git LFS", f"`git lfs pull` in {model}")
    tokenizer = Path(get(cfg, f"{node}.tokenizer_path") or model)
    if tokenizer.is_dir():
        files = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
        if not any((tokenizer / name).is_file() for name in files):
            refuse_model(f"{tokenizer} has no tokenizer", f"{whole}, or its tokenizer_path")
        key = f"{node}.custom_chat_template"
        own = get(cfg, key) or _json(tokenizer / "tokenizer_config.json").get("chat_template")
        if not own and not any(tokenizer.glob("chat_template*")) and not any(tokenizer.glob("additional_chat*")):
            refuse_model("its tokenizer has no chat template, and prompts are messages", f"{key}=<Jinja>")
    config = config.get("text_config", config)
    longest = sum(get(cfg, f"{ROLLOUT}.{name}") for name in ("prompt_length", "response_length"))
    positions = config.get("max_position_embeddings")
    scaled = '"factor"' in json.dumps([config.get("rope_scaling"), config.get("rope_parameters")])  # a longer range
    if isinstance(positions, int) and longest > positions and not scaled:
        reason = f"with prompts it makes {longest} tokens, and {model} has {positions} positions"
        refuse("data.max_response_length", get(cfg, f"{ROLLOUT}.response_length"), reason, "less, or a longer model")


def last_step(run: Path) -> int | None:
    """Of the last whole checkpoint in a trainer.default_local_dir, by verl's record; None without one, or where it was
    cut short: verl writes it in place."""
    text = (run / LATEST).read_text().strip() if (run / LATEST).is_file() else ""
    return int(text) if text.isdecimal() else None


def resumes_from(cfg: DictConfig) -> Path | None:
    """The folder that verl would load; None where it starts from scratch."""
    mode, folder = get(cfg, "trainer.resume_mode"), Path(get(cfg, "trainer.default_local_dir", "."))
    if mode == "auto" and (tracker := folder / LATEST).is_file():
        return folder / f"global_step_{tracker.read_text().strip()}"
    path = get(cfg, "trainer.resume_from_path") if mode == "resume_path" else None
    return Path(path) if path else None


def _step(checkpoint: Path) -> int:
    step = checkpoint.name.removeprefix("global_step_")
    return int(step) if step.isdecimal() else 0


def _check_resume(cfg: DictConfig) -> None:
    """What verl would resume from, if that is on this machine."""
    mode, found = get(cfg, "trainer.resume_mode"), resumes_from(cfg)
    if mode == "auto" and found and not found.is_dir():
        reason = f"{found.parent / LATEST} names {found}, which is not there: the run would start from scratch"
        refuse("trainer.resume_mode", mode, reason, f"disable, or remove {LATEST}")
    if not found or not found.is_dir():
        return
    key, contents = f"{_CHECKPOINT}.load_contents", get(cfg, f"{_CHECKPOINT}.load_contents", [])
    if "model" not in contents:
        reason = f"{found} would be resumed from without its weights"
        refuse(key, contents, reason, "[model,optimizer,extra], or trainer.resume_mode=disable")
    saved = OmegaConf.load(found / "config.yaml") if (found / "config.yaml").is_file() else OmegaConf.create()
    for name, part in _RESTORED.items():
        setting = f"{ACTOR}.optim.{name}"
        then, now = get(saved, setting), get(cfg, setting)
        if part in contents and then not in (None, now):
            others = ",".join(other for other in contents if other != part)
            reason = f"{found} was saved with {words(then)}, and verl restores that with {part!r} of {key}"
            refuse(setting, now, reason, f"{setting}={words(then)}, or {key}=[{others}]")
    for setting in _IDENTITY if mode == "auto" else ():
        then, now = get(saved, setting), get(cfg, setting)
        if setting == MODEL:  # a copy may lie elsewhere
            then, now = then and Path(then).name, now and Path(now).name
        if then != now and setting.rpartition(".")[2] in get(saved, setting.rpartition(".")[0], {}):
            reason = f"{found} was saved with {words(then)}, and the run would go on from there"
            remedy = f"{setting}={words(then)}, another trainer.default_local_dir, or to go on all the same "
            refuse(setting, now, reason, f"{remedy}trainer.resume_mode=resume_path trainer.resume_from_path={found}")
    ranks = get(cfg, "trainer.nnodes") * get(cfg, "trainer.n_gpus_per_node")
    here = any(found.parent.glob("global_step_*/actor"))  # not on a node without GPUs whose disk is its own
    if here and not (found / "actor" / f"model_world_size_{ranks}_rank_0.pt").is_file():
        reason = f"{found} has no weights of {ranks} ranks (verl removes those of all but the last checkpoints)"
        refuse("trainer.resume_mode", mode, reason, "as many GPUs as saved it, another checkpoint, or disable")
    last = get(cfg, "trainer.total_training_steps")
    if last is not None and _step(found) >= last and not get(cfg, "trainer.val_only"):
        refuse("trainer.total_training_steps", last, f"{found} has as many steps already", f"more than {_step(found)}")


def _check_checkpoints(cfg: DictConfig) -> None:
    if (path := get(cfg, "trainer.resume_from_path")) and "global_step_" not in path:
        refuse("trainer.resume_from_path", path, "it is no checkpoint of a step", "<run>/global_step_<n>")
    model, folder = Path(get(cfg, MODEL, "")), Path(get(cfg, "trainer.default_local_dir", "."))
    if get(cfg, "trainer.save_freq", -1) <= 0 or not model.is_dir() or "://" in str(folder):
        return
    contents = get(cfg, f"{_CHECKPOINT}.save_contents", [])
    config = _json(model / "config.json")
    each = 4 if "float32" in (config.get("dtype"), config.get("torch_dtype")) else 2
    parameters = sum(path.stat().st_size for path in weight_files(model)) / each  # which _check_model has found
    saved = dict(_SAVED)
    if get(cfg, f"{ACTOR}.fsdp_config.model_dtype", "fp32") in ("bf16", "bfloat16", "fp16", "float16"):
        saved |= {"model": 2, "optimizer": 4}
    if get(cfg, "actor_rollout_ref.model.lora.rank") or get(cfg, "actor_rollout_ref.model.lora_rank"):
        saved["optimizer"] = 0  # of adapters
    needed = parameters * sum(saved.get(name, 0) for name in contents)  # in a folder that all nodes share
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if needed > (free := shutil.disk_usage(there).free):
        reason = f"a checkpoint takes {needed / 1e9:.0f} GB, and {there} has {free / 1e9:.0f} GB"
        refuse("trainer.default_local_dir", str(folder), reason, "another folder, or trainer.save_freq=-1")
