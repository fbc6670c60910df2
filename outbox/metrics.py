"""The options of a process that is to be watched by Prometheus."""

import argparse
import logging
from typing import Final

from outbox.errors import ConfigError
from outbox.events import Observer

MEASURE_SECONDS: Final = 60.0


def add_metrics(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="serve metrics for Prometheus on this port; 0: on any that is free",
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
        ConfigError: the port or the interval can't be used, or the extra is missing.
    """
    if arguments.metrics_port is None:
        return None
    if not arguments.metrics_interval > 0:
        raise ConfigError(
            f"metrics-interval={arguments.metrics_interval:g}: must be above 0"
        )
    try:
        from outbox.observers.prometheus import PrometheusEvents
    except ImportError as error:
        raise ConfigError(
            f"metrics-port={arguments.metrics_port}: {error}; "
            "pip install 'pillarbox[metrics]'"
        ) from error
    metrics = PrometheusEvents()
    port = metrics.serve(arguments.metrics_port).port
    logging.getLogger("pillarbox").info("metrics are served on port %d", port)
    return metrics
