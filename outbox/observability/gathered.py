"""The endpoints of several processes at one address; needs aiohttp.

Each serves its own on the loopback interface. What they answer is put together.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from typing import cast

from aiohttp import ClientError, ClientSession, ClientTimeout, web
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.aiohttp import make_aiohttp_handler
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from typing_extensions import override

from pillarbox.outbox.observability.health import answer_live, answer_ready
from pillarbox.outbox.observability.http_server import Handler

_LIMIT = ClientTimeout(total=5)


class Gathered:
    """Health and metrics of several processes.

    A process that doesn't answer isn't ready, and its metrics are missing.

    Args:
        addresses: the endpoints of each process by its number; None while it has none.
        registry: metrics of the process that serves them.
        is_stopping: whether the processes drain.
    """

    def __init__(
        self,
        addresses: Mapping[int, str | None],
        registry: CollectorRegistry,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._addresses = addresses
        self._registry = registry
        self._is_stopping = is_stopping

    def handlers(self) -> Mapping[str, Handler]:
        """Return the request handlers, by path."""
        return {"/live": answer_live, "/ready": self._ready, "/metrics": self._metrics}

    async def _ready(self, _: web.BaseRequest) -> web.StreamResponse:
        if self._is_stopping():
            return answer_ready(["end"])
        waits_for = []
        for number, text in (await self._ask("/ready")).items():
            waits = ["answer"] if text is None else json.loads(text)["waits_for"]
            waits_for += [f"{what} of process {number}" for what in waits]
        return answer_ready(waits_for)

    async def _metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        families = _Families()
        families.add("parent", self._registry.collect())
        for number, text in (await self._ask("/metrics")).items():
            families.add(str(number), text_string_to_metric_families(text or ""))
        gathered = CollectorRegistry(auto_describe=True)
        gathered.register(families)
        return await cast("Handler", make_aiohttp_handler(gathered))(request)

    async def _ask(self, path: str) -> Mapping[int, str | None]:
        async with ClientSession(timeout=_LIMIT) as session:

            async def ask(address: str | None) -> str | None:
                if address is None:
                    return None
                try:
                    async with session.get(f"http://{address}{path}") as answer:
                        return await answer.text()
                except (ClientError, TimeoutError):
                    return None

            texts = await asyncio.gather(*map(ask, self._addresses.values()))
        return dict(zip(self._addresses, texts, strict=True))


class _Families(Collector):
    """Metrics of several processes, whose number is the label `process`."""

    def __init__(self) -> None:
        self._by_name: dict[str, Metric] = {}

    def add(self, process: str, families: Iterable[Metric]) -> None:
        for it in families:
            family = self._by_name.setdefault(
                it.name, Metric(it.name, it.documentation, it.type)
            )
            for sample in it.samples:
                labels = {**sample.labels, "process": process}
                family.add_sample(sample.name, labels, sample.value)

    @override
    def collect(self) -> Iterable[Metric]:
        return self._by_name.values()
