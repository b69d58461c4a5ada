"""What a model's files are for: which form they are exported in, and what can be made of a checkpoint again."""

from __future__ import annotations

from collections.abc import Sequence

from pyrage import RecipientError, x25519

from app import ids
from app.domain.records import Checkpoint, Model
from app.errors import BadRequest
from app.services.checks.models import CRITIC, POLICY

FORMATS = ("peft", "huggingface")
METADATA_KEY = "export_format"


def exports_merged(asked: str | None, model: Model) -> bool:
    """Whether an export is to hold the whole model where only an adapter was trained.

    `asked`, else what `model` was made with under METADATA_KEY, since the SDK's call has no argument for it; else PEFT
    files. Raises BadRequest where the model has no such form.
    """
    form = asked or model.user_metadata.get(METADATA_KEY) or ("huggingface" if model.full else "peft")
    if form not in FORMATS:
        raise BadRequest(f"export format {str(form)[:80]!r} is unknown: ask for one of {', '.join(FORMATS)}")
    if form == "peft" and model.full:
        raise BadRequest("all of this model's weights are trained, so it has no PEFT files: export it as huggingface")
    if form == "huggingface" and model.critic and not model.full:
        raise BadRequest("a critic's value head is no part of a Hugging Face causal model: export it as peft")
    return form == "huggingface" and not model.full


def check_recipients(recipients: Sequence[str]) -> tuple[str, ...]:
    """Each once, in order: a repeat of the call is the same call. Raises BadRequest for what is no age public key."""
    for recipient in recipients:
        try:
            x25519.Recipient.from_str(recipient)
        except RecipientError:
            raise BadRequest(
                f"{recipient[:80]!r} is not an age recipient: give a public key such as age-keygen prints (age1...)"
            ) from None
    return tuple(sorted(set(recipients)))


def check_loadable(path: ids.TinkerPath, checkpoint: Checkpoint, optimizer: bool) -> None:
    """Raises BadRequest for a merged model, and for an optimizer state that only a training checkpoint holds."""
    check_adapter(path, checkpoint)
    if optimizer and path.kind != "weights":
        raise BadRequest(f"{path} holds no optimizer state: load it without, or load one saved with save_weights")


def check_adapter(path: ids.TinkerPath, checkpoint: Checkpoint) -> None:
    """Raises BadRequest for a merged model and for encrypted files: no adapter can be read of them any more."""
    if checkpoint.encrypted:
        raise BadRequest(f"{path} is encrypted, for download alone: use a checkpoint that is not")
    if checkpoint.merged:
        raise BadRequest(f"{path} is a merged model, for download alone: use a checkpoint of its adapter")


def check_same_role(path: ids.TinkerPath, checkpoint: Checkpoint, *, critic: bool) -> None:
    """A critic is loaded from a critic's checkpoint, a policy from a policy's: their heads differ."""
    if checkpoint.critic != critic:
        found, wanted = (CRITIC, POLICY) if checkpoint.critic else (POLICY, CRITIC)
        raise BadRequest(f"{path} is a {found}'s, with another head than a {wanted} has; load a {wanted}'s checkpoint")


def check_same_kind(path: ids.TinkerPath, checkpoint: Checkpoint, *, full: bool) -> None:
    """An adapter is loaded from an adapter, all of a model's weights from all of them."""
    if checkpoint.full != full:
        kinds = {True: "all weights of a model", False: "a LoRA adapter"}
        raise BadRequest(
            f"{path} holds {kinds[checkpoint.full]}, and this model trains {kinds[full]}; create a new model from the "
            "checkpoint instead"
        )
