"""Base class of optimizers that wrap another one on several ranks; checks that ranks hold the same; Muon and AdamW."""

from replicas.averaging import Buffers, average_tensors, broadcast_parameters, broadcast_tensors, restored
from replicas.elastic_rounds import ElasticRounds
from replicas.loading import check_like, is_dense, wholly
from replicas.muon_adamw import MuonAdamW
from replicas.parameters import check_named_parameters
from replicas.process_group import default_group
from replicas.states import (
    STATE_KEY,
    broadcast_state,
    check_saved_by,
    gathered_state,
    saved_by,
    state_of_rank,
    states_of_ranks,
)
from replicas.unlike import hash_bits, refuse_unlike
from replicas.version import __version__
from replicas.wrapped_state import check_loaded, foreseen_state, load_into, saved_optimizer
from replicas.wrapping import Wrapping

__all__ = [
    "STATE_KEY",
    "Buffers",
    "ElasticRounds",
    "MuonAdamW",
    "Wrapping",
    "__version__",
    "average_tensors",
    "broadcast_parameters",
    "broadcast_state",
    "broadcast_tensors",
    "check_like",
    "check_loaded",
    "check_named_parameters",
    "check_saved_by",
    "default_group",
    "foreseen_state",
    "gathered_state",
    "hash_bits",
    "is_dense",
    "load_into",
    "refuse_unlike",
    "restored",
    "saved_by",
    "saved_optimizer",
    "state_of_rank",
    "states_of_ranks",
    "wholly",
]
