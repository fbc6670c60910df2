"""A program that runs moto's server with fixes for behaviour that breaks the tests.

moto's threads share queues without locks, so each request has to run without a thread
switch. moto reads the clock for each message in a queue, with a function that takes
microseconds. A poll that waits for a group of a FIFO queue spins. For each message
sent, moto counts the whole queue three times; here it uses the queue's length. After
the visibility timeout of a group, moto can deliver only part of the group, or its last
message first.
"""

import sys
import time
from importlib import import_module
from typing import Any


def main() -> None:
    """Run `moto_server` with its options."""
    sys.setswitchinterval(5)
    server: Any = import_module("moto.server")
    models: Any = import_module("moto.sqs.models")
    models.unix_time = time.time
    models.unix_time_millis = lambda: time.time() * 1000
    models.Queue.wait_for_messages = lambda _, __: time.sleep(0.01)  # noqa: TID251 - in the server
    models.Queue.approximate_number_of_messages = property(lambda q: len(q._messages))
    models.Queue.approximate_number_of_messages_not_visible = 0
    models.Queue.approximate_number_of_messages_delayed = 0
    models.Queue.messages = property(_messages)
    models.Queue.pending_message_groups = property(lambda _: set())
    server.main(sys.argv[1:])


def _messages(queue: Any) -> list[Any]:
    visible = [m for m in queue._messages if m.visible and not m.delayed]
    queue.pending_messages.difference_update(visible)
    if not queue.fifo_queue:
        return visible
    held = {m.group_id for m in queue.pending_messages}
    return [m for m in visible if m.group_id not in held]


if __name__ == "__main__":
    main()
