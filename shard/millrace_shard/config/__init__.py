"""The flags of the shard, each declared once with its environment variable, default and meaning.

Entry point: `ShardConfig`. Each flag is a field of the group that it belongs to. The launcher imports this room too, so
that it must import nothing larger than pydantic.
"""

from millrace_shard.config.logs import log_level
from millrace_shard.config.shard_config import ShardConfig

__all__ = ["ShardConfig", "log_level"]
