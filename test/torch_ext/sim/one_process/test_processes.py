"""Importing initialises nothing, a fork after the first use is refused, and the number of devices is fixed by then."""

import pytest
import torch

from test.torch_ext.interpreter import python


@pytest.mark.costly
def test_import_starts_no_thread_and_initialises_nothing():
    code = (
        "import os, torch, torch_ext.sim\n"
        "torch.manual_seed(1); torch.sim.device_count(); torch.sim.is_available()\n"
        "print(len(os.listdir('/proc/self/task')), torch.sim.is_initialized(), torch.sim._is_in_bad_fork())"
    )
    done = python("-c", code, OPENBLAS_NUM_THREADS="1")
    assert done.stdout.split() == ["1", "False", "False"], done.stderr


@pytest.mark.costly
def test_fork_after_first_use_is_refused_and_before_it_is_fine():
    code = (
        "import os, torch, torch_ext.sim\n"
        "a = torch.ones(3, 3, device='cpu')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: a.detach().to('sim').requires_grad_().square()\n"
        "    except RuntimeError as error: print(torch.sim._is_in_bad_fork(), error, flush=True); os._exit(3)\n"
        "    os._exit(0)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert python("-c", code).stdout.split() == ["0"]
    used = python("-c", code.replace("cpu", "sim"))
    assert "Cannot re-initialize sim in forked subprocess" in used.stdout and used.stdout.split()[-1] == "3"


@pytest.mark.costly
def test_device_count_is_read_at_first_use_and_checked():
    code = (
        "import os, torch, torch_ext.sim\n"
        "os.environ['TORCH_EXT_SIM_DEVICES'] = '7'\n"
        "torch.ones(1, device='sim:6'); os.environ['TORCH_EXT_SIM_DEVICES'] = '2'; print(torch.sim.device_count())"
    )
    assert python("-c", code).stdout.split() == ["7"]
    use = "import torch, torch_ext.sim; torch.ones(1, device='sim')"
    bad = python("-c", use, TORCH_EXT_SIM_DEVICES="many")
    assert "ValueError: TORCH_EXT_SIM_DEVICES=many" in bad.stderr


@pytest.mark.costly
def test_devices_can_be_requested_until_the_first_use():
    ask = (
        "import torch, torch_ext.sim; torch.sim.request_devices(6); torch.sim.request_devices(2)\n"
        "print(torch.sim.device_count())\n"
        "if torch.sim.device_count() == 6: torch.ones(1, device='sim:5')\n"
        "torch.ones(1, device='sim:0'); torch.sim.request_devices(9); print(torch.sim.device_count())"
    )
    assert python("-c", ask).stdout.split() == ["6", "6"]
    assert python("-c", ask, TORCH_EXT_SIM_DEVICES="3").stdout.split() == ["3", "3"]
    for count in (0, 65):
        with pytest.raises(ValueError, match=f"from 1 to 64, got {count}"):
            torch.sim.request_devices(count)
