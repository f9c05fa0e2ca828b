"""Names of keys and fields. All keys of a pool share one hash tag, so that one script may touch them all.

``<prefix>:<schema>:{<pool>}:`` then

=================  ======  =========================================================================================
pool               hash    gen rank rev gvt epochs decisions unlabelled unknown inferred mislabelled grace alive quiet
                           exp_s exp_n named config cfgv wv pv pv_told upd upd_at upd_v
classes            hash    act held rel done adm blk z d at vt gap gapn hexp hgot rl, each as ``<name>:<class>``
instances          set     instance keys ``<dp rank>|<instance id>``
i:<instance>       hash    inc seq seen state state_at snap age bs born gone cordon drain failed_at; ses blocks shared
                           backlog c:<class> hat hexp:<class> hgot:<class>; upd upd_at upd_v wv pv swv ce ep clears;
                           need added budget cap caps brake pressure signals stalled;
                           px_src px_stream px_seq px_at px_behind px_n (see _prefix.lua)
x:<instance>       zset    hashes of prefixes it holds, 8 bytes each, by time of their last store
g:<instance>       hash    shared prefixes: n:<group> sessions, b:<group> blocks, k:<group> class
home:<instance>    set     sessions at home there
inc:<instance>     set     incarnations that are over
s:<session>        hash    st (live | held | paused) class declared group gsize pv inst inc token ttl exp admitted since
                           rank phase turn endturn endctx endep endclears ctx ctx_at blocks at z peak shr ask reason
                           detail retry present homeless gap_at output ticket waits cached d home_at gap gapn; inf conf
                           byinf mis moves; resumes; of a paused one, was was_inc was_clears was_ctx
sessions           zset    all sessions, by name
leases             zset    sessions by expiry of their lease (paused ones: of their memory)
held               zset    held sessions by the end of their place in the queue
q:<class>          zset    held sessions by rank
queues             set     classes whose queue is not empty
names              set     classes that no configuration knew when somebody first declared them
changed            zset    sessions by revision of their last change
done:<session>     hash    what a session cost, for ten minutes
r:<request id>     hash    an answer, for ten minutes
gr:<group>         string  rank of the group's first arrival
h:<session>        list    history
events             stream  what happened in the pool
policy, state      string  what the controller published, and its own state
tick               string  holder of the epoch
wake               channel capacity may have come free
=================  ======  =========================================================================================
"""

from __future__ import annotations

#: Raised whenever keys or fields change their meaning.
SCHEMA = 1


def escape(name: str) -> str:
    """``name`` with the characters that hash tags are made of written as %XX."""
    return name.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")


def unescape(text: str) -> str:
    """The reverse of :func:`escape`."""
    return text.replace("%7D", "}").replace("%7B", "{").replace("%25", "%")


def pool_prefix(prefix: str, pool: str) -> str:
    """What all keys of a pool begin with."""
    return f"{prefix}:{SCHEMA}:{{{escape(pool)}}}:"


def pools_key(prefix: str) -> str:
    """The set of all pools that a server ever touched."""
    return f"{prefix}:{SCHEMA}:pools"


def instance_key(instance_id: str, dp_rank: int) -> str:
    """Identity of an instance inside its pool."""
    return f"{dp_rank}|{instance_id}"


def split_instance(key: str) -> tuple[str, int]:
    """Name and rank of an instance, from its key."""
    rank, _, name = key.partition("|")
    return name, int(rank)
