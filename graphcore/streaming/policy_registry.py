"""The registry of streaming policies, by name."""

from graphcore.config.settings import StreamingSettings
from graphcore.registry import collect
from graphcore.streaming import policies
from graphcore.streaming.policy import StreamingPolicy
from graphcore.weights.plan import Keeps

# Each name is that of its file: settings are checked against file names, before this module is imported.
POLICIES = {policy.name: policy for policy in collect(policies, StreamingPolicy)}


def keeps_of(streaming: StreamingSettings) -> Keeps:
    """Return what the chosen policy keeps on the device; `validate_settings` has checked its name."""
    return POLICIES[streaming.policy].keeps
