"""How a world takes in what its ranks and their zygote tell, in whatever order and company that comes."""

from __future__ import annotations

import tempfile
import threading

from torch_ext.world.channel import channel_pair
from torch_ext.world.follow import RankProcess, World
from torch_ext.world.output import Capture
from torch_ext.world.protocol import Ended, Phase, Ticket
from torch_ext.world.wait_page import WaitPage

# Seconds, far above what a pump takes.
DEADLINE_S = 30


def test_channel_that_outlives_its_rank_holds_nobody_up() -> None:
    """The rank's end and its last words come in one round, and a process that it has left behind keeps the channel."""
    zygote, _zygotes = channel_pair()
    group, zygotes_group = channel_pair()
    channel, ranks = channel_pair()
    with tempfile.TemporaryFile() as output:
        process = RankProcess(0, "rank 0", channel, Capture(0, output, None), -1, WaitPage())
        world = World(zygote, group, [process], Ticket("test", 0))
        zygotes_group.send(Ended(0, 0, 1.0))
        ranks.send(Phase.RUNNING)
        pump = threading.Thread(target=world.pump, args=(DEADLINE_S,), daemon=True)
        pump.start()
        pump.join(DEADLINE_S)
        hung = pump.is_alive()
        ranks.close()
        pump.join(DEADLINE_S)
        assert not hung
        assert process.exitcode == 0
        world.close()
