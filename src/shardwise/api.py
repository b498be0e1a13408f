"""The public names, and where each of them is. :mod:`shardwise` takes them from here when the first is used."""

from .checkpoint.checkpointer import Checkpointer as Checkpointer
from .checkpoint.checkpointer import save as save
from .checkpoint.verify import verify as verify
from .digests.live import digest as digest
from .export.full import iter_full as iter_full
from .export.hub import export_hf as export_hf
from .loading.clone import clone as clone
from .loading.initialize import initialize as initialize
from .loading.load import load as load
from .loading.pretrained import load_pretrained as load_pretrained
from .models.meta_init import meta_init as meta_init
from .plan.records import IOOptions as IOOptions
from .runs.restore import restore as restore
from .sharding.fsdp import ShardPolicy as ShardPolicy
from .sharding.fsdp import shard as shard
from .state.data import ResumableLoader as ResumableLoader
from .state.sampler import ElasticSampler as ElasticSampler
from .state.train_state import TrainState as TrainState
