# SPDX-License-Identifier: Apache-2.0
"""What the documents point at exists: files, keys of the composed configuration, the choices and defaults of the recipe,
options of commands, metrics, names in the code, and the words of errors. ``named.py`` says what the code names."""

import re
from pathlib import Path

import named
import pytest
import yaml
from omegaconf import OmegaConf

from flashrl_verl import errors
from flashrl_verl.quickstart import compose

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "flashrl_verl"
GROUPS = PACKAGE / "configs"
PAGES = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.name != "LOG.md")
MANUALS = ["README.md", "CONTRIBUTING.md", "recipe/flashrl/README.md", *PAGES]
DOCUMENTS = [*MANUALS, "CHANGELOG.md", "docs/LOG.md"]
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(?<![\w./<>-])((?:flashrl_verl|recipe|requirements|scripts|tests|docs|configs)/[\w./*-]*\w)")
FILE = re.compile(r"[\w./*-]+\.(?:py|sh|md|txt|yaml|png|json)")
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|(?<=[\s(]))flashrl ((?:bench )?\w+)([^#|;&]*)")
METRIC = re.compile(r"(?<![\w/.-])(?:flashrl|rollout_corr|training|actor|critic|perf|timing_s)/[\w/]*(?:(?:<\w+>|\*)\w*)*")
QUOTE = re.compile(r'"([^"\n]+)"( \((?:verl|vLLM)\))?')
COMPILED = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
"""Names that occur in C++ alone: torch's and NCCL's."""
KEY = r"(?<![\w./+-])((?:{roots})(?:\.\w+)+)"
OVERRIDE = re.compile(r"(?<![\w./-])\+?([a-z]\w*(?:\.\w+)*)=")


def _text(name: str) -> str:
    return (ROOT / name).read_text()


def _blocks(name: str) -> list[str]:
    """Lines of the shell blocks, without comments, continued lines joined."""
    blocks = [block for language, block in FENCE.findall(_text(name)) if language == "bash"]
    return [line.partition(" #")[0] for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def _spans(name: str) -> list[str]:
    """What stands between single backticks."""
    return CODE.findall(FENCE.sub("", _text(name)))


def _anchors(path: Path) -> set[str]:
    """Those that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _rows(name: str, heading: str) -> list[list[str]]:
    """The cells of the last table of a section, without its header."""
    section = re.split(r"\n## ", _text(name).partition(f"\n## {heading}\n")[2])[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 2, heading
    return rows[2:]


@pytest.fixture(scope="module")
def configurations():
    """What the manuals talk about: DAPO-32B, base and the quickstart."""
    return {name: compose([f"experiment={name}"]) for name in ("dapo_qwen2.5_32b_int8", "base", "quickstart")}


def _keys(cfg) -> set[str]:
    """Every dotted key, nodes included."""
    found = set()

    def visit(prefix, node):
        for key, value in node.items():
            found.add(f"{prefix}{key}")
            if isinstance(value, dict):
                visit(f"{prefix}{key}.", value)

    visit("", OmegaConf.to_container(cfg, resolve=False))
    return found


@pytest.fixture(scope="module")
def keys(configurations):
    return set().union(*map(_keys, configurations.values()))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_local_links_resolve_and_nothing_is_left_to_fill_in(name):
    text = _text(name)
    assert "@@" not in text and "TODO" not in text
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        path = ((ROOT / name).parent / link).resolve() if link else ROOT / name
        assert path.exists(), link
        assert not anchor or anchor in _anchors(path), f"{link}#{anchor}"


def test_the_readme_stays_short():
    assert len(_text("README.md").splitlines()) < 200


@pytest.mark.parametrize("name", PAGES)
def test_a_page_stays_short(name):
    assert len(_text(name).splitlines()) <= 120


# ---- files ----


def test_everything_in_the_table_of_files_exists():
    for names, told in _rows("README.md", "Files"):
        first, *beside = CODE.findall(names)
        assert list(ROOT.glob(first)), first
        for name in beside:
            assert list((ROOT / first).parent.glob(name)), f"{name}, beside {first}"
        for folder in re.findall(r"`([\w/]+)`", told):
            assert (ROOT / first / folder).is_dir(), f"{folder}, in {first}"


@pytest.mark.parametrize("name", MANUALS)
def test_files_named_in_the_manuals_exist(name):
    text = _text(name)
    files = {*PATH.findall(text), *(code for code in _spans(name) if FILE.fullmatch(code))}
    for path in files:
        folders = (ROOT, PACKAGE, (ROOT / name).parent, named.SITE)
        there = any(list(folder.glob(path)) for folder in folders)
        # What a run writes: ours and verl's name it in their code.
        written = f'"{Path(path).name}"' in named.source() + named.upstream()
        assert there or written, path


# ---- keys ----


@pytest.mark.parametrize("name", MANUALS)
def test_keys_named_in_the_manuals_exist(name, configurations, keys):
    text = _text(name)
    if name == "recipe/flashrl/README.md":
        for old, _ in _rows(name, "Why V1 and not `RayDAPOTrainer`"):  # scripts for another trainer
            text = text.replace(old, "")
    roots = "|".join({root for cfg in configurations.values() for root in cfg})
    for key in re.findall(KEY.format(roots=roots), text):
        assert key in keys or FILE.fullmatch(key), key  # quickstart.py is no key


@pytest.mark.parametrize("name", MANUALS)
def test_overrides_named_in_the_manuals_are_keys_or_groups(name, keys):
    for code in [*_spans(name), *_blocks(name)]:
        for word in OVERRIDE.findall(code):
            known = (GROUPS / word).is_dir() or any(f".{key}".endswith(f".{word}") for key in keys)
            added = f"+{word}=" in code and any(word.startswith(f"{key}.") for key in keys)
            assert known or added or word.startswith("hydra."), word


@pytest.mark.parametrize("name", PAGES)
def test_a_dotted_name_in_a_page_is_a_key_a_module_or_a_file(name, keys):
    for code in _spans(name):
        word = code.removeprefix("+").partition("=")[0]
        if not re.fullmatch(r"[a-z]\w*(\.\w+)+", word) or FILE.fullmatch(word):
            continue
        added = code.startswith("+") and any(word.startswith(f"{key}.") for key in keys)
        last = word.rpartition(".")[2]
        entry_point = f'"{word}"' in (ROOT / "setup.py").read_text()
        assert word in keys or added or entry_point or word.split(".")[0] not in _roots(keys) and last in named.words(), word


def _roots(keys) -> set[str]:
    return {key.partition(".")[0] for key in keys}


def test_the_table_of_experiments_says_what_they_compose_to():
    rows = {CODE.findall(row[0])[0]: row[1:] for row in _rows("recipe/flashrl/README.md", "Experiments")}
    assert set(rows) == {path.stem.removeprefix("run_") for path in (ROOT / "recipe" / "flashrl").glob("run_*.sh")}
    for name, (model, gpus, rollout, cap, _) in rows.items():
        cfg = compose([f"experiment={name}"])
        assert cfg.actor_rollout_ref.model.path.split("/")[1] == model
        assert f"{cfg.trainer.nnodes} x {cfg.trainer.n_gpus_per_node}" == gpus.partition(" (")[0]
        assert cfg.flashrl.precision.upper() == rollout
        correction = cfg.algorithm.rollout_correction
        assert (correction.rollout_is, correction.rollout_is_threshold) == ("token", float(cap))


def test_overrides_of_the_recipe_have_the_choices_and_defaults_that_its_table_gives(configurations):
    base = (GROUPS / "experiment" / "base.yaml").read_text()
    for _, names, choices in _rows("recipe/flashrl/README.md", "Overrides"):
        default, *others = CODE.findall(choices)
        words = re.findall(r"`([\w.]+)=`", names)
        assert words
        for word in words:
            if (GROUPS / word).is_dir():
                assert {default, *others} == {path.stem for path in (GROUPS / word).glob("*.yaml")}, word
                assert word == "experiment" or f"- /{word}: {default}\n" in base, word
            else:
                value = OmegaConf.select(configurations["base"], word)
                assert yaml.safe_load(default) == value and value is not None, word
            if "in the 32B experiment" in choices:
                assert yaml.safe_load(others[0]) == OmegaConf.select(configurations["dapo_qwen2.5_32b_int8"], word), word


# ---- commands, metrics, names, messages ----


@pytest.mark.parametrize("name", MANUALS)
def test_options_of_commands_exist(name):
    for line in [*_spans(name), *_blocks(name)]:
        told = [(command, rest) for command, rest in COMMAND.findall(line)]
        told += [("quickstart", line)] if "scripts/quickstart.sh" in line else []
        for command, rest in told:
            assert command in named.options(), line
            assert set(re.findall(r"(?<!\S)(--[\w-]+)", rest)) <= named.options()[command], line


@pytest.mark.parametrize("name", PAGES)
def test_metrics_named_in_the_pages_are_logged(name):
    there = named.metrics_of_ours() | named.metrics_of_the_correction() | named.metrics_of_a_run()
    for code in _spans(name):
        for metric in METRIC.findall(code):
            if metric.endswith("/") or FILE.fullmatch(code):
                continue
            pattern = re.sub(r"<\w+>|\\\*", r"\\w+", re.escape(metric).replace("\\<", "<").replace("\\>", ">"))
            assert any(re.fullmatch(pattern, known) for known in there), metric


def test_the_mismatch_of_the_page_on_precision_is_that_of_the_results():
    measured: dict[str, dict[str, str]] = {}
    for line in re.findall(r"^\| (?:NVIDIA H200|CPU) \|.*", _text("docs/results/mismatch.md"), re.MULTILINE):
        device, precision, _, _, common, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        measured.setdefault(device.removeprefix("NVIDIA "), {})[precision] = common.partition(" ")[0]
    assert set(measured) == {"H200", "CPU"}
    told = {row[0]: row[1:] for row in _rows("docs/precision_and_cap.md", "Which precision runs where")}
    for device, by_precision in measured.items():
        assert told[device] == [by_precision[precision] for precision in ("bf16", "int8", "fp8")], device


def test_every_metric_of_ours_is_in_the_table_that_says_what_they_are():
    rows = _rows("docs/how_a_step_works.md", "Every `flashrl/` metric")
    told = [re.sub(r"<\w+>", r"\\w+", metric) for names, *_ in rows for metric in CODE.findall(names)]
    for metric in named.metrics_of_ours():
        assert any(re.fullmatch(pattern, metric) for pattern in told), metric


@pytest.mark.parametrize("name", PAGES)
def test_names_in_the_pages_are_in_the_code(name):
    for code in _spans(name):
        word = code.removesuffix("()").partition("(")[0]
        if re.fullmatch(r"[A-Za-z_]\w*", word) and re.search(r"_|[a-z][A-Z]", word):
            assert word in named.words() | COMPILED, code


def test_words_of_errors_are_those_of_the_code():
    for page in ("docs/troubleshooting.md", "docs/upgrading.md", "docs/tuning.md"):
        for quote, elsewhere in QUOTE.findall(CODE.sub("", FENCE.sub("", _text(page)))):
            assert quote in named.upstream() if elsewhere else named.says(quote), (page, quote)


def test_every_error_of_ours_is_in_the_page_of_troubles():
    told = _text("docs/troubleshooting.md")
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.FlashRLError):
            assert f"`{error.__name__}`" in told, error
