"""Commands to Redis that the user of the experiment `own` may not send."""

from nexrl.store import key_prefix

OTHERS_KEY = key_prefix("other", "model") + "meta"
OTHERS_CHANNEL = key_prefix("other", "model") + "wake"
REFUSED = (
    f"HGETALL {OTHERS_KEY}",
    f"HSET {OTHERS_KEY} granted 1",
    f"DEL {OTHERS_KEY}",
    f"RENAME {OTHERS_KEY} {key_prefix('own', 'model')}meta",
    "EVAL return 0",
    f"SUBSCRIBE {OTHERS_CHANNEL}",
    "PSUBSCRIBE *",
    f"PUBLISH {OTHERS_CHANNEL} batch",
    "SCAN 0",
    "KEYS *",
    f"KEYS {key_prefix('other', 'model')}*",
    "RANDOMKEY",
    "DBSIZE",
    "MONITOR",
    "CONFIG GET requirepass",
    "CONFIG SET maxmemory 1",
    "FLUSHALL",
    "FLUSHDB",
    "SWAPDB 0 1",
    "ACL WHOAMI",
    "ACL LIST",
    "ACL SETUSER own ~*",
    "CLIENT LIST",
    "CLIENT KILL TYPE normal",
    "SLOWLOG GET",
    "SCRIPT FLUSH",
    "SHUTDOWN NOSAVE",
    "REPLICAOF NO ONE",
    "SAVE",
)
