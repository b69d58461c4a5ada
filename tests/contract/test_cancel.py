"""`tinsmith cancel` ends a session's runs under a client that trains: each call gets one answer, checkpoints stay."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tinker

from tests.contract.data import ADAM, supervised, train
from tests.contract.stack import Stack


def test_each_call_is_answered_and_the_checkpoint_can_be_loaded(
    stack: Stack, service: tinker.ServiceClient, training: tinker.TrainingClient
):
    losses = train(training, 1)
    saved = training.save_state("kept").result().path
    sent = [training.forward_backward(supervised(), "cross_entropy") for _ in range(20)]
    sent.append(training.optim_step(ADAM))
    command = [sys.executable, "-m", "app.cli", "cancel", training.model_id.partition(":")[0], "--yes"]
    said = subprocess.run([*command, f"--data-dir={stack.data_dir}"], stdout=subprocess.PIPE, timeout=120, text=True)
    assert said.returncode == 0 and said.stdout.startswith("ended 1 run and 1 session of ")
    for call in sent:
        error = call.future().exception(timeout=120)
        assert error is None or "this run has ended" in str(error)
    with pytest.raises(Exception, match="this run has ended"):
        training.forward_backward(supervised(), "cross_entropy").result()
    again = service.create_training_client_from_state(saved).result()
    assert train(again, 1)[0] < losses[0], "it goes on from what was saved"
