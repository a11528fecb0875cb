# SPDX-License-Identifier: Apache-2.0
"""Resume on another number of ranks: an FSDP2 checkpoint of verl's is cut anew while it is loaded.

verl writes one file a rank, ``model_world_size_<N>_rank_<r>.pt`` and ``optim_...``, whose DTensors are rows of the parameters
and of Adam's moments, and looks for its own N when it loads. Here every rank maps all files of the other N into memory and
copies the rows that are its own now: nothing is written. While a state is loaded a rank holds its share of it twice, the copy
and what it replaces, as when verl loads.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import fsdp_version

from flashrl_verl.errors import FlashRLError
from flashrl_verl.reshard import reshard, same_cut

log = logging.getLogger("verl.flashrl")

CONFIG_FILE = "fsdp_config.json"
"""verl's record beside the shards: FSDP's version and the number of ranks."""

_MODEL_SHARD = re.compile(r"model_world_size_(\d+)_rank_\d+\.pt")

_AGAIN = "Resume from an earlier one: trainer.resume_mode=resume_path, trainer.resume_from_path=<folder>/global_step_<N>"


class ElasticCheckpointManager(FSDPCheckpointManager):
    """verl's checkpoints, loadable by any number of FSDP2 ranks. Saving is verl's, unchanged."""

    @classmethod
    def of(cls, manager: FSDPCheckpointManager) -> ElasticCheckpointManager:
        """The same model, optimizer and settings as ``manager``'s."""
        return cls(
            model=manager.model,
            optimizer=manager.optimizer,
            lr_scheduler=manager.lr_scheduler,
            processing_class=manager.processing_class,
            checkpoint_config=manager.checkpoint_config,
            trust_remote_code=manager.trust_remote_code,
        )

    def load_checkpoint(self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False) -> None:
        """verl's; a checkpoint of another number of ranks, or cut over another mesh, is resharded. All ranks have to call it.

        Args:
            local_path: folder of the shards, on storage that every rank reads; None loads nothing.
            hdfs_path: as verl's, not used.
            del_local_after_load: as verl's; does nothing to resharded files.

        Raises:
            FlashRLError: on every rank: the checkpoint is not of FSDP2, or shards are missing or cannot be read, and nothing
                was loaded. Or they do not fit the model.
        """
        saved = None if local_path is None else self._saved(Path(local_path))
        if saved is None:  # verl says what it lacks
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
            return
        folder, version = Path(local_path), fsdp_version(self.model)
        if saved.fsdp not in (None, version):
            raise FlashRLError(
                f"{folder} was saved by FSDP {saved.fsdp} and this run has FSDP {version}: neither reads the other's shards. "
                "Remedy: actor_rollout_ref.actor.strategy as it was (fsdp is FSDP 1, fsdp2 is FSDP 2)"
            )
        if saved.ranks == self.world_size and not (version == 2 and self._is_cut_otherwise(folder)):
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
            return
        if version != 2:
            raise FlashRLError(
                f"{folder} was saved by {saved.ranks} ranks and this run has {self.world_size}: only FSDP2's checkpoints are "
                "cut anew. Remedy: actor_rollout_ref.actor.strategy=fsdp2 from the start, or the same trainer.nnodes and "
                "trainer.n_gpus_per_node as before"
            )
        self._load_cut_anew(folder, saved.ranks)

    def _saved(self, folder: Path) -> Saved | None:
        """Who saved it, as the first rank that can tell does: without shared storage the record is on one node alone."""
        found = [saved for saved in together(lambda: saved_by(folder)) if saved is not None]
        return next((saved for saved in found if saved.fsdp is not None), found[0] if found else None)

    def _wanted(self) -> list[str]:
        """Kinds of shards that this run loads."""
        wanted = {"model": self.should_load_model, "optim": self.should_load_optimizer, "extra_state": self.should_load_extra}
        return [kind for kind, wants in wanted.items() if wants]

    def _is_cut_otherwise(self, folder: Path) -> bool:
        """Whether any rank's shard is cut over another mesh than its model is, as with another ``fsdp_size``.

        Every rank opens all that it is going to load: a file that verl then could not read would stop that rank alone.
        """

        def differs() -> bool:
            own = {kind: Shards(folder, kind, self.world_size) for kind in self._wanted()}
            states = {kind: shards.load(self.rank) for kind, shards in own.items()}
            mine = self.model.state_dict()
            both = ((shard, mine.get(name)) for name, shard in states.get("model", {}).items())
            return any(isinstance(s, DTensor) and isinstance(m, DTensor) and not same_cut(s, m) for s, m in both)

        return any(together(differs))

    def _load_cut_anew(self, folder: Path, ranks: int) -> None:
        if self.rank == 0:
            log.warning(
                "%s was saved by %d ranks and is cut anew for %d; random states start anew", folder, ranks, self.world_size
            )
        states: dict[str, list[dict[str, Any]]] = {}

        def open_all() -> None:
            shards = {kind: Shards(folder, kind, ranks) for kind in self._wanted()}
            for kind in shards.values():
                kind.require()
            # Mapped, not read: what is kept of them until their turn is names and places.
            states.update({kind: files.load_all() for kind, files in shards.items()})

        together(open_all)  # all of them, before anything is loaded
        if "model" in states:
            self._load_model(folder, states.pop("model"))
        if "optim" in states:
            self._load_optimizer(folder, states.pop("optim"))
        if "extra_state" in states and self.lr_scheduler is not None:
            # The same on every rank. Random states are not: there are more or fewer of them now.
            extra = states["extra_state"][0]
            if extra["lr_scheduler"] is not None:
                self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        torch.distributed.barrier()

    def _load_model(self, folder: Path, states: Sequence[Mapping[str, Any]]) -> None:
        if self.is_lora_only_state_dict(states[0]):
            raise FlashRLError(
                f"{folder} holds {len(states[0])} tensors of LoRA adapters alone, and only whole models are cut anew. "
                "Remedy: the same trainer.nnodes, trainer.n_gpus_per_node and fsdp_size as before"
            )
        mine = self.model.state_dict()
        if states[0].keys() != mine.keys():
            differing = sorted(states[0].keys() ^ mine.keys())
            raise FlashRLError(
                f"{folder} is of another model: {len(differing)} names differ ({', '.join(differing[:4])}). Set "
                "actor_rollout_ref.model.path to the model that was trained, or trainer.resume_mode=disable"
            )
        self.model.load_state_dict({name: reshard([s[name] for s in states], mine[name], name) for name in mine})

    def _load_optimizer(self, folder: Path, states: Sequence[Mapping[str, Any]]) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        first = states[0]
        if "state" not in first or len(parameters) != sum(len(group["params"]) for group in first["param_groups"]):
            raise FlashRLError(
                f"{folder}: the optimizer's state is not of this run's {len(parameters)} parameters, and cannot be cut "
                "anew. Set actor_rollout_ref.actor.checkpoint.load_contents=[model,extra] to go on without it"
            )
        moments = {
            index: {
                key: reshard([s["state"][index][key] for s in states], parameters[index], f"{key} of parameter {index}")
                for key in entries
            }
            for index, entries in first["state"].items()
        }
        self.optimizer.load_state_dict({"state": moments, "param_groups": first["param_groups"]})


class Shards:
    """The files of one kind that the ranks of an earlier run wrote.

    Args:
        folder: where they lie.
        kind: model, optim or extra_state.
        ranks: how many there are.
    """

    def __init__(self, folder: Path, kind: str, ranks: int):
        self.folder = folder
        self.files = [folder / f"{kind}_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]

    def require(self) -> None:
        """All of them have to be here.

        Raises:
            FlashRLError: one is not.
        """
        missing = [file.name for file in self.files if not file.is_file()]
        if missing:
            raise FlashRLError(
                f"{self.folder} was saved by {len(self.files)} ranks, and {len(missing)} of their files are not here "
                f"({missing[0]}). To resume on another number of GPUs every node has to read all of them: put "
                "trainer.default_local_dir on storage that the nodes share"
            )

    def load(self, rank: int) -> dict[str, Any]:
        """The file of one rank, its tensors mapped rather than read.

        Raises:
            FlashRLError: it is not there, cut off, or not to be read.
        """
        file = self.files[rank]
        try:
            return torch.load(file, map_location="cpu", mmap=True, weights_only=False)
        except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise FlashRLError(
                f"{file} cannot be read ({why}). Nothing was loaded. Every rank needs rights to its file and its "
                f"storage; if it was cut off, the checkpoint is not whole. {_AGAIN}"
            ) from error

    def load_all(self) -> list[dict[str, Any]]:
        """Those of all ranks, in their order."""
        return [self.load(rank) for rank in range(len(self.files))]


@dataclass(frozen=True)
class Saved:
    """Who saved a checkpoint."""

    ranks: int
    fsdp: int | None
    """FSDP's version; None where only the names of the files were there to tell."""


def saved_by(folder: Path) -> Saved | None:
    """Who saved the checkpoint in ``folder``: as verl's record says, else as the names of its files do; None for neither.

    Raises:
        FlashRLError: the record is damaged or not to be read, or there is none and the files are of several numbers of ranks.
    """
    try:
        record = json.loads((folder / CONFIG_FILE).read_text())
        return Saved(int(record["world_size"]), int(record["FSDP_version"]))
    except FileNotFoundError:
        names = folder.glob("model_world_size_*.pt")
        ranks = sorted({int(match[1]) for name in names if (match := _MODEL_SHARD.fullmatch(name.name))})
    except (ValueError, KeyError, TypeError) as error:
        raise FlashRLError(
            f"{folder / CONFIG_FILE} is damaged ({type(error).__name__}: {error}), so the checkpoint is not whole. {_AGAIN}"
        ) from None
    except OSError as error:
        raise FlashRLError(
            f"{folder / CONFIG_FILE} cannot be read ({error.strerror}). Nothing was loaded. Every rank needs rights to it and "
            "the storage it lies on"
        ) from error
    if len(ranks) > 1:
        raise FlashRLError(
            f"{folder} has shards of {' and of '.join(map(str, ranks))} ranks and no {CONFIG_FILE} that says which are the "
            f"last. {_AGAIN}"
        )
    return Saved(ranks[0], None) if ranks else None


def together(ask: Callable[[], Any]) -> list[Any]:
    """What every rank finds, in their order.

    Raises:
        FlashRLError: the first that a rank raised, of whatever kind, on all of them: none waits for one that has given up.
    """
    own: Exception | None = None
    try:
        mine: Any = (ask(), None)
    except FlashRLError as error:
        mine, own = (None, str(error)), error
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for this one's answer
        rank = torch.distributed.get_rank()
        mine, own = (None, f"rank {rank} could not go on: {type(error).__name__}: {error}"), error
    told: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, mine)
    if error := next((error for _, error in told if error is not None), None):
        raise FlashRLError(error) from own
    return [found for found, _ in told]


def require_same_ranks(folder: Path, ranks: int) -> None:
    """Refuse a critic's checkpoint of another number of ranks: it is loaded by verl's own manager, which needs the same.

    Args:
        folder: the critic's part of a checkpoint.
        ranks: of this run's critic.

    Raises:
        FlashRLError: there are more or fewer of them now.
    """
    saved = saved_by(folder)
    if saved is not None and saved.ranks != ranks:
        raise FlashRLError(
            f"{folder} was saved by {saved.ranks} ranks and this run has {ranks}: a critic's checkpoint is not cut anew, "
            "as the actor's is. Nothing was loaded. Remedy: the same trainer.nnodes and trainer.n_gpus_per_node as before"
        )
