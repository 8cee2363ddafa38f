"Services get each row once, and their failures cost the run nothing."

import threading

import pytest

from llm_from_scratch.config import Config, replace
from llm_from_scratch.env import Ranks
from llm_from_scratch.trackers import Background, MlflowTracker, Trackers


class Listed:
    def __init__(self):
        self.steps = []

    def log(self, step, row):
        self.steps.append(step)

    def close(self):
        pass


def test_a_service_that_does_not_open_drops_rows_and_warns_once(tmp_path, caplog):
    def refuse():
        raise ConnectionError("no route to host")

    tracker = Background("made up", refuse, tmp_path / "sent.json")
    for step in range(1, 6):
        tracker.log(step, {"loss": 1.0})
    tracker.close()
    assert tracker.num_dropped == 5 and tracker.has_warned and not tracker.thread.is_alive()


def test_a_service_that_hangs_holds_up_neither_a_step_nor_the_end(tmp_path):
    never = threading.Event()
    tracker = Background("made up", lambda: never.wait(300), tmp_path / "sent.json", max_waiting=3)
    for step in range(1, 101):
        tracker.log(step, {"loss": 1.0})
    tracker.close(seconds=0.2)
    assert tracker.num_dropped >= 97
    never.set()
    tracker.close()
    assert not tracker.thread.is_alive()


def test_a_resume_sends_no_step_twice(tmp_path):
    listed = Listed()
    for first, last in ((1, 30), (21, 40)):
        tracker = Background("made up", lambda: listed, tmp_path / "sent.json")
        for step in range(first, last + 1):
            tracker.log(step, {"loss": 1.0})
        tracker.close()
    assert listed.steps == list(range(1, 41)) and tracker.num_repeated == 10


@pytest.mark.slow
def test_wandb_offline_keeps_one_run_over_a_resume(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    config = replace(Config(), log={"wandb": "offline"})
    for first, last in ((1, 6), (4, 8)):
        with Trackers(config, tmp_path, Ranks()) as trackers:
            for step in range(first, last + 1):
                trackers.log(step, {"loss": 9 / step, "gpu_throttle": "idle"})
        assert trackers.all[0].num_dropped == 0
    assert trackers.all[0].num_repeated == 3
    folders = [path.name for path in (tmp_path / "trackers" / "wandb").glob("offline-run-*")]
    assert len({name.rpartition("-")[2] for name in folders}) == 1
    assert sum(path.stat().st_size for path in (tmp_path / "trackers" / "wandb").glob("offline-run-*/*.wandb")) > 0


@pytest.mark.slow
def test_mlflow_holds_each_step_once_over_a_resume(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    config = replace(Config(), log={"mlflow": (tmp_path / "store").as_uri()})
    for first, last in ((1, 6), (4, 8)):
        with Trackers(config, tmp_path / "run", Ranks()) as trackers:
            for step in range(first, last + 1):
                trackers.log(step, {"loss": 9 / step})
        assert trackers.all[0].num_dropped == 0
    tracker = MlflowTracker(config, tmp_path / "run" / "trackers", mlflow)
    history = tracker.client.get_metric_history(tracker.name, "loss")
    assert [metric.step for metric in history] == list(range(1, 9))


@pytest.mark.slow
def test_a_server_that_nobody_runs_costs_rows_only(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    config = replace(Config(), log={"mlflow": "http://127.0.0.1:9"})
    with Trackers(config, tmp_path, Ranks()) as trackers:
        for step in range(1, 4):
            trackers.log(step, {"loss": 1.0})
    assert trackers.all[0].num_dropped == 3
