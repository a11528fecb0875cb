# SPDX-License-Identifier: Apache-2.0
"""What the documents point at exists, and the keys they name are keys of the composed configuration."""

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/LOG.md", "recipe/flashrl/README.md"]
KEY = re.compile(r"\b((?:flashrl|algorithm|actor_rollout_ref|trainer|data|reward)(?:\.\w+)+)=")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_local_links_resolve_and_nothing_is_left_to_fill_in(name):
    text = (ROOT / name).read_text()
    assert "@@" not in text and "TODO" not in text
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert ((ROOT / name).parent / link).exists(), link


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 200


def test_keys_named_in_the_documents_exist():
    import verl

    config_dir = str(ROOT / "recipe" / "flashrl" / "config")
    verl_configs = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(config_dir=config_dir, version_base=None):
        search = f"hydra.searchpath=[file://{verl_configs},pkg://flashrl_verl.configs]"
        cfg = compose("flashrl_trainer", overrides=["experiment=dapo_qwen2.5_32b_int8", search])
    missing = object()
    for name in ("README.md", "recipe/flashrl/README.md"):
        for key in KEY.findall((ROOT / name).read_text()):
            parent, _, leaf = key.rpartition(".")
            node = OmegaConf.select(cfg, parent, default=missing)
            assert node is not missing and leaf in node, f"{name} names {key}"
