"""The options of a process that is to be watched by Prometheus."""

import argparse
import logging
from typing import Final

from outbox.errors import ConfigError
from outbox.events import Observer
from outbox.observability.listen_address import FORMS, ListenAddress

MEASURE_SECONDS: Final = 60.0


def add_metrics(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--metrics-listen",
        metavar="ADDRESS",
        help=f"serve metrics for Prometheus there: {FORMS} (default: nowhere)",
    )
    parser.add_argument(
        "--metrics-interval",
        type=float,
        default=MEASURE_SECONDS,
        metavar="SECONDS",
        help="how often dead letters are counted for them (default: %(default)g)",
    )


def serve_metrics(arguments: argparse.Namespace) -> Observer | None:
    """Serve metrics and give the observer that feeds them; None if not asked for.

    Raises:
        ConfigError: the address or the interval can't be used, or the extra is missing.
    """
    if arguments.metrics_listen is None:
        return None
    address = ListenAddress.read(arguments.metrics_listen, "metrics-listen")
    if not arguments.metrics_interval > 0:
        raise ConfigError(
            f"metrics-interval={arguments.metrics_interval:g}: must be above 0"
        )
    try:
        from outbox.observability.prometheus import PrometheusEvents
    except ImportError as error:
        raise ConfigError(
            f"metrics-listen={address}: {error}; pip install 'pillarbox[metrics]'"
        ) from error
    metrics = PrometheusEvents()
    served = metrics.serve(address)
    logging.getLogger("pillarbox").info(
        "metrics endpoint listening on %s", served.address
    )
    return metrics
