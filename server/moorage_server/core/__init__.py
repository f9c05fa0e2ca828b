"""The policy, pure: plain values in, decisions out. No I/O, no clock of its own, no grpc, no redis.

Read it in the order of policy.md: ``estimates`` and ``survival`` (what sessions are like), ``forecast`` (what they will
hold), ``quotas`` (how an instance is shared), ``pressure`` (what overrules the model), ``placement`` (where), ``queue``
(who first), ``admission`` (all of it, for one session), ``controller`` (once per epoch).
"""
