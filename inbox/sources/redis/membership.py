"""How a member leaves a consumer group of Redis without taking an entry with it."""

from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

_SCRIPT: Final = """
local group, member = ARGV[1], ARGV[2]
local pending = redis.pcall('XPENDING', KEYS[1], group, '-', '+', 1, member)
if pending.err then return pending end
if #pending > 0 then return 0 end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], group, member)
return 1
"""


async def end_membership(client: Redis, stream: bytes, group: str, member: str) -> bool:
    """End it if nothing is pending for the member, in one step; tell whether it is so.

    A read that was cancelled may still be under way at the server, and be given an
    entry after a look. With the member that would be gone from the group.
    """
    try:
        ended: Any = await client.eval(_SCRIPT, 1, stream, group, member)
    except NoPermissionError:
        # A name that stays in the group is no harm.
        return True
    return bool(ended)
