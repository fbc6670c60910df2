"""The settings of a relay are a value."""

import copy
import pickle

from outbox.lane import Priority
from relay.config import RelayConfig


def test_a_later_change_of_the_callers_weights_changes_nothing() -> None:
    weights = dict.fromkeys(Priority, 1)
    config = RelayConfig(weights=weights)

    weights[Priority.BULK] = 0

    assert config.weights[Priority.BULK] == 1


def test_settings_can_be_hashed_and_copied() -> None:
    config = RelayConfig(batch_size=7)

    for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert same == config
        assert hash(same) == hash(config)
