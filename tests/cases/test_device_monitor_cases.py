"What the machine does meanwhile is in every row, costs no step, and a library that fails takes nothing with it."

import io
import json
import subprocess
import sys
import threading
from contextlib import redirect_stderr
from types import SimpleNamespace

import pynvml
import pytest
import torch

from llm_from_scratch.config import LogConfig
from llm_from_scratch.device_monitor import DeviceMonitor, HostReader, NvidiaReader, RunMeter, main, throttle_reasons, watch_device
from llm_from_scratch.efficiency import BestStretch, Efficiency, efficiency_figures
from llm_from_scratch.env import Ranks, UserError
from llm_from_scratch.monitoring import Throughput, Window


class Broken:
    "A library whose every call fails the same way."

    NVMLError = pynvml.NVMLError

    def __init__(self, code):
        self.code = code

    def __getattr__(self, name):
        if name.startswith("NVML"):
            return getattr(pynvml, name)

        def call(*arguments):
            raise pynvml.NVMLError(self.code)

        return call


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_UNKNOWN])
def test_a_library_that_always_fails_gives_no_figure_and_no_error(code):
    reader = NvidiaReader("gpu 0", Broken(code))
    assert reader() == {} and reader() == {}
    assert "gpu_percent" in reader.absent and "nvlink_sent" in reader.absent


def test_without_a_driver_the_command_shows_the_host(capsys):
    assert main(["--once", "--json"], Broken(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == ["time", "host"] and shown["host"]["host_rss_bytes"] > 0


def test_a_counter_that_begins_again_makes_no_rate():
    counts = iter([5000, 6000, 10, 2010])
    answer = lambda: SimpleNamespace(nvmlReturn=0, valueType=pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, value=SimpleNamespace(uiVal=next(counts)))
    nvml = Broken(pynvml.NVML_ERROR_NOT_SUPPORTED)
    nvml.nvmlDeviceGetFieldValues = lambda gpu, asked: [answer()]
    reader = NvidiaReader("gpu 0", nvml, clock=iter(range(10)).__next__)
    reader.links = ["pcie_sent"]
    rates = [reader().get("gpu_pcie_sent_bytes_per_second") for _ in range(4)]
    assert rates == [None, 1000, None, 2000]


def test_every_reason_of_the_header_has_words():
    names = [name for name in dir(pynvml) if name.startswith("nvmlClocksThrottleReason") and name not in ("nvmlClocksThrottleReasonAll", "nvmlClocksThrottleReasonNone")]
    for name in names:
        assert "0x" not in throttle_reasons(getattr(pynvml, name))[0], name


def test_the_thread_ends_with_its_block_even_when_the_run_fails():
    with pytest.raises(ZeroDivisionError), watch_device(torch.device("cpu"), ".", 100) as monitor:
        1 / 0
    monitor.thread.join(300)
    assert not monitor.thread.is_alive()


def test_a_window_does_not_wait_for_a_reading():
    entered, never = threading.Event(), threading.Event()
    hanging = lambda: (entered.set(), never.wait(600), {})[2]
    monitor = DeviceMonitor([hanging], hz=100)
    assert entered.wait(300)
    assert monitor.window() == {} and monitor.thread.is_alive()
    never.set()
    monitor.close()


def test_a_run_s_random_numbers_are_not_touched(tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with RunMeter(LogConfig(), tmp_path, Ranks(), torch.device("cpu"), torch.float32, flops_per_token=1e6) as meter:
        meter.window(Window(10, 1.0, samples=1, loaded=10, trained=10), 1)
    assert torch.equal(torch.rand(3), expected)


def test_only_rank_0_measures(tmp_path):
    with RunMeter(LogConfig(), tmp_path, Ranks(1, 1, 2), torch.device("cpu"), torch.float32, flops_per_token=1e6) as meter:
        assert meter.window(Window(10, 1.0), 1) == {} and meter.monitor is None


def test_bad_rates_are_one_line():
    for arguments in (["--hz", "0"], ["--hz", "101"], ["--seconds", "0"], ["--hz", "quick"]):
        with redirect_stderr(io.StringIO()), pytest.raises(UserError):
            main(arguments)


def test_a_share_never_exceeds_one_and_a_resume_keeps_the_best():
    stretch = BestStretch()
    shares = [stretch.add(8, seconds) for seconds in [1.0] * 25 + [0.5] * 25 + [2.0] * 25]
    told = [share for share in shares if share is not None]
    assert max(told) == 1.0 and told[-1] == pytest.approx(0.25)
    before = [{"step": step, "step_seconds": 0.5, "samples_per_second": 16.0} for step in range(1, 31)]
    resumed = Efficiency(before)
    rows = [resumed.window(samples=8, loaded=64, trained=64, waited=0.0, seconds=1.0, num_steps=1) for _ in range(20)]
    assert rows[-1]["effective_throughput"] == pytest.approx(0.5)


def test_counts_of_windows_add_up():
    now = [0.0]
    throughput, windows = Throughput(clock=lambda: now[0]), []
    for step, batch in enumerate(throughput.waiting([4] * 10), 1):
        now[0] += 0.1
        throughput.add(batch * 30, samples=batch, loaded=batch * 32, trained=0 if step == 3 else batch * 30)
        if step % 4 == 0 or step == 10:
            windows.append(throughput.window())
    assert sum(window.samples for window in windows) == 40
    assert sum(window.loaded for window in windows) == 40 * 32
    assert sum(window.trained for window in windows) == 36 * 30
    rows = [{"step": step, "step_seconds": 0.1, "samples_per_second": 40.0, "data_use": w.trained / w.loaded, "loaded_tokens": w.loaded} for step, w in zip((4, 8, 10), windows)]
    assert efficiency_figures(rows)["data use"] == pytest.approx(36 * 30 / (40 * 32))


@pytest.mark.slow
def test_ctrl_c_ends_the_live_view():
    import signal

    process = subprocess.Popen([sys.executable, "-m", "llm_from_scratch.monitoring", "gpu", "--json"], stdout=subprocess.PIPE, text=True)
    try:
        assert json.loads(process.stdout.readline())["host"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_processors_have_no_share_before_the_kernel_has_counted():
    reader = HostReader()
    assert "cpu_percent" not in reader() and "host_rss_bytes" in reader()
    reader.looked -= 1
    seen = reader()
    assert 0 <= seen["cpu_percent"] <= 100 and "process_cpu_percent" in seen and "cpu_percent" not in reader()
