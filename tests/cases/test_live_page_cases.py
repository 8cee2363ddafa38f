"The live page follows a run, shows the report's pictures, and answers nobody but this machine's browser."

import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from llm_from_scratch.live_page import RunView, open_server
from llm_from_scratch.monitoring import MetricsWriter, main, write_report

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


def write_steps(run_dir, first, last, resume_step=0):
    with MetricsWriter(run_dir, resume_step=resume_step, tensorboard=False) as writer:
        for step in range(first, last + 1):
            writer.log(step, loss=8.0 / step, lr=1e-3, grad_norm=1.0, tokens_per_second=100.0, data_wait_share=0.1, host_rss_bytes=1 << 30)


@contextmanager
def serving(run_dir):
    with open_server(run_dir) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(60)


def status(address, path, host=None):
    request = urllib.request.Request(address + path, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_only_this_machine_by_its_own_names_is_answered(tmp_path):
    with serving(tmp_path) as (server, address):
        assert server.server_address[0] == "127.0.0.1"
        assert [status(address, "/", host) for host in (None, "localhost", "localhost:9", "evil.example", "127.0.0.1.evil.example", "[::1]")] == [200, 200, 200, 421, 421, 421]


def test_no_path_leads_out_of_the_few_that_exist(tmp_path):
    write_steps(tmp_path / "run", 1, 3)
    (tmp_path / "secret.png").write_bytes(b"\x89PNG secret")
    with serving(tmp_path / "run") as (_, address):
        for path in ("/picture/../../secret.png", "/picture/..%2f..%2fsecret.png", "/picture/gradients-../../../secret.png", "/metrics.jsonl", "//etc/passwd", "/picture/"):
            assert status(address, path) == 404, path


def test_a_run_that_begins_later_and_is_cut_back_is_followed(tmp_path):
    with open_server(tmp_path) as server:
        assert "no row yet" in server.view.state()["note"]
        write_steps(tmp_path, 1, 30)
        first = server.view.state()
        assert first["summary"]["steps"] == "30"
        picture = server.view.picture("loss.png")
        write_steps(tmp_path, 21, 22, resume_step=20)
        second = server.view.state()
        assert second["summary"]["steps"] == "22" and second["version"] != first["version"]
        assert server.view.picture("loss.png") != picture
        shutil.rmtree(tmp_path)
        assert "no row yet" in server.view.state()["note"]


def test_live_and_static_pages_show_the_same_pictures(tmp_path):
    write_steps(tmp_path, 1, 20)
    (tmp_path / "report" / "gradients").mkdir(parents=True)
    (tmp_path / "report" / "gradients" / "step 10.png").write_bytes(b"\x89PNG of gradients")
    page = write_report(tmp_path, title="run", summary={}).read_text()
    with open_server(tmp_path) as server:
        shown = server.view.state()["pictures"]
        assert list(shown.values()) == re.findall(r'<img alt="([^"]+)"', page)
        for name in shown:
            kept = tmp_path / "report" / (name if not name.startswith("gradients-") else f"gradients/{name.removeprefix('gradients-')}")
            assert server.view.picture(name) == kept.read_bytes(), name


def test_a_folder_that_is_not_there_is_one_line(command, tmp_path):
    code, out, err = command("monitoring", "serve", tmp_path / "gone")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1 and "no such folder" in err


@pytest.mark.slow
def test_ctrl_c_ends_the_server(tmp_path):
    process = subprocess.Popen([sys.executable, "-m", "llm_from_scratch.monitoring", "serve", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().split()[0]
        assert status(address, "") == 200
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0 and out == "ended\n" and err == ""
    finally:
        process.kill()
        process.wait()


def browse(address, *options):
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", *options, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_real_browser_fills_the_live_page_and_shows_the_static_one(tmp_path):
    write_steps(tmp_path / "run", 1, 40)
    with serving(tmp_path / "run") as (_, address):
        dom = browse(address + "/", "--virtual-time-budget=20000", "--dump-dom").stdout
        shot = tmp_path / "live.png"
        browse(address + "/", "--virtual-time-budget=20000", "--window-size=1200,1400", f"--screenshot={shot}")
    assert "<td>40</td>" in dom and "40 rows of metrics.jsonl" in dom
    assert len(re.findall(r"<img[^>]+/picture/\w+\.png", dom)) == 6
    assert shot.read_bytes()[:4] == b"\x89PNG"
    assert main(["report", str(tmp_path / "run")]) == 0
    page = tmp_path / "run" / "report" / "index.html"
    dom = browse(page.as_uri(), "--dump-dom").stdout
    assert dom.count("data:image/png") == 6 and not re.search(r'(src|href)="(https?:)?//', dom)


def test_a_value_that_is_no_number_stands_in_the_note(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": "x"}\n')
    view = RunView(tmp_path)
    assert "no number" in view.state()["note"] and view.picture("loss.png") is None
