# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face hub: what is in its cache is used, what is not there is one error with the way round it."""

import http.server
import json
import threading

import pytest
from published_data import COMMIT, dapo_rows, gsm8k_folder, gsm8k_rows, hub_cache, prepare_data

from flashrl_verl.tools.data.catalog import CATALOG, Name


def test_a_branch_in_the_hubs_cache_is_used_and_recorded_by_its_commit(tmp_path):
    files = {"main/train-00000-of-00001.parquet": gsm8k_rows(5), "main/test-00000-of-00001.parquet": gsm8k_rows(4)}
    cache = hub_cache(tmp_path / "hub", "openai/gsm8k", COMMIT, files)
    done = prepare_data("gsm8k", "--revision", "main", cwd=tmp_path, HF_HUB_CACHE=str(cache))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "data" / "gsm8k-test.json").read_text())
    assert (record["source"]["name"], record["source"]["revision"]) == ("openai/gsm8k", COMMIT)
    assert record["source"]["file"] == "main/test-00000-of-00001.parquet" and not record["source"]["published"]
    # A commit that was prepared from is not fetched again: no cache, no network.
    again = prepare_data("gsm8k", "--revision", COMMIT, cwd=tmp_path, HF_HUB_CACHE=str(tmp_path / "none"))
    assert again.returncode == 0 and again.stdout.count("unchanged") == 2, again.stderr


def test_without_a_network_the_error_names_the_way_round_it(tmp_path):
    done = prepare_data("aime-2024", cwd=tmp_path, HF_HUB_CACHE=str(tmp_path / "none"))
    commit = CATALOG[Name.AIME_2024].revision
    assert done.returncode == 1 and done.stderr.startswith("DataError: BytedTsinghua-SIA/AIME-2024 (revision ")
    assert (
        f"hf download BytedTsinghua-SIA/AIME-2024 data/aime-2024.parquet --repo-type dataset --revision {commit}"
        in done.stderr
    )
    assert "--source FOLDER" in done.stderr and "Traceback" not in done.stderr and not (tmp_path / "data").exists()


GSM8K = {"train": "main/train-00000-of-00001.parquet", "test": "main/test-00000-of-00001.parquet"}


def test_the_way_round_brings_every_file_that_is_needed(tmp_path):
    nowhere = {"cwd": tmp_path, "HF_HUB_CACHE": str(tmp_path / "none")}
    both = prepare_data("gsm8k", **nowhere).stderr
    assert f"hf download openai/gsm8k {GSM8K['train']} {GSM8K['test']} --repo-type" in both
    assert "--source FOLDER --split train or test" in both
    one = prepare_data("gsm8k", "--split", "test", **nowhere).stderr
    assert f"hf download openai/gsm8k {GSM8K['test']} --repo-type" in one and "--split train" not in one


def test_a_folder_with_one_split_only_says_how_to_prepare_that_one(tmp_path):
    folder = gsm8k_folder(tmp_path / "gsm8k")
    (folder / GSM8K["test"]).unlink()
    refused = prepare_data("gsm8k", "--source", folder, cwd=tmp_path)
    assert refused.returncode == 1 and "--split train prepares the other one alone" in refused.stderr
    done = prepare_data("gsm8k", "--source", folder, "--split", "train", cwd=tmp_path)
    assert done.returncode == 0 and "gsm8k-train.parquet: 5 rows" in done.stdout, done.stderr


@pytest.fixture
def faltering_hub():
    """A hub that is busy at first, and then knows of nothing."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            self.send_response(503 if len(asked) < 3 else 404)  # the hub's client warns from its second attempt on
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *words):
            pass

    asked = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


def test_the_hub_is_announced_and_only_its_last_failure_is_told(tmp_path, faltering_hub):
    endpoint, asked = faltering_hub
    variables = {
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_CACHE": str(tmp_path / "none"),
    }
    done = prepare_data("gsm8k", cwd=tmp_path, **variables)
    assert len(asked) > 2 and done.returncode == 1
    assert done.stdout.startswith(f"asking the Hugging Face hub for openai/gsm8k, {GSM8K['train']} (")
    assert done.stderr.startswith("DataError: openai/gsm8k (revision ")
    assert len(done.stderr.splitlines()) == 1  # no line of the hub's for its first attempt


def test_what_the_hub_gives_for_the_known_commit_has_to_be_what_was_published(tmp_path):
    known = CATALOG[Name.DAPO_MATH_17K]
    cache = hub_cache(tmp_path / "hub", known.hub_id, known.revision, {"data/dapo-math-17k.parquet": dapo_rows()})
    done = prepare_data("dapo-math-17k", cwd=tmp_path, HF_HUB_CACHE=str(cache))
    assert done.returncode == 1 and known.files[0].sha256 in done.stderr and not (tmp_path / "data").exists()


def test_another_repository_of_the_same_format_is_taken_from_the_hub(tmp_path):
    cache = hub_cache(tmp_path / "hub", "me/my-math", COMMIT, {"data/dapo-math-17k.parquet": dapo_rows()})
    done = prepare_data(
        "dapo-math-17k", "--source", "me/my-math", "--revision", COMMIT, cwd=tmp_path, HF_HUB_CACHE=str(cache)
    )
    assert done.returncode == 0 and f"of 18 rows of me/my-math at {COMMIT[:12]}, each prompt 3 times" in done.stdout, (
        done.stderr
    )


def test_every_data_set_is_fetched_at_a_commit_and_compared_with_a_checksum():
    assert set(CATALOG) == set(Name)
    for data_set in CATALOG.values():
        assert len(data_set.revision) == 40 and all(len(file.sha256) == 64 for file in data_set.files)
    assert len({json.dumps([file.output, file.sha256]) for d in CATALOG.values() for file in d.files}) == 4
