"""Exports checkpoints as Hugging Face directories, for `asyncrl export` and as input models."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from asyncrl.errors import AsyncrlError, UserError
from asyncrl.monitoring.terminal.formatting import size
from asyncrl.trainer.base.errors import CheckpointError
from asyncrl.trainer.checkpoint import export_files
from asyncrl.trainer.checkpoint.export_files import default_place, is_export_of
from asyncrl.trainer.checkpoint.format.files import choose, path_of
from asyncrl.trainer.checkpoint.format.manifest import read_manifest
from asyncrl.trainer.lora.files import ADAPTER


def export_run(
    run: Path, step: int | None, output: Path | None, dtype: str | None, *, merge: bool = False
) -> tuple[Path, bool]:
    """Export a checkpoint of a run; return the directory, and True if it is new.

    Defaults: `step` is the newest whole checkpoint, `output` is RUN/exports/step-NNNNNN, and
    `dtype` that of training. With `merge`, a LoRA run exports the merged model instead of the
    adapter. Raises UserError if the checkpoint is missing, damaged or of another format, or if the
    output exists and is something else.
    """
    checkpoints = run / "checkpoints"
    try:
        if step is None:
            checkpoint = choose(checkpoints).directory
            if checkpoint is None:
                raise UserError(f"the run {run} does not have a checkpoint yet")
        else:
            checkpoint = path_of(checkpoints, step)
            if not checkpoint.is_dir():
                choose(checkpoints, step)  # says which there are
        if output is not None and output.exists():
            raise UserError(f"{output} exists and is never replaced; give another --output")
        adapter = (checkpoint / ADAPTER).is_dir()
        if merge and not adapter:
            raise UserError(f"--merge: {checkpoint} is a whole model, without an adapter to merge")
        adapter = adapter and not merge
        place = output or default_place(checkpoint, dtype, adapter=adapter)
        if is_export_of(place, checkpoint, dtype):
            return place, False
        _export(checkpoint, place, dtype, adapter=adapter)
    except CheckpointError as error:
        raise UserError(str(error)) from error
    return place, True


def hub_token(name: str) -> str:
    """Return the hub's token. Raises UserError without one, or if `name` is not OWNER/NAME."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        if name.count("/") != 1:
            raise HFValidationError("it must be OWNER/NAME")
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(
            f"--push-to-hub: {name!r} is not a repository of the hub: {error}"
        ) from None
    token = get_token()
    if token is None:
        raise UserError(
            f"--push-to-hub {name}: there is no token of the hub; set HF_TOKEN to one that may "
            "write there, or call `hf auth login`. Nothing was exported"
        )
    return token


def push(exported: Path, name: str, token: str, *, private: bool) -> str:
    """Upload an export to the hub; return the commit's address.

    Its record stays here, as it names a path of this machine. Raises UserError if the hub refuses
    it, or with `private` if the repository is public; AsyncrlError if it cannot be reached.
    """
    from huggingface_hub import HfApi

    hub = HfApi(token=token)
    try:
        hub.create_repo(name, private=private or None, exist_ok=True)
        if private and not hub.model_info(name).private:
            done = None
        else:
            done = hub.upload_folder(
                repo_id=name,
                folder_path=exported,
                commit_message=f"Upload {exported.name} of an asyncrl run",
                ignore_patterns=[export_files.RECORD],
            )
    except Exception as error:  # of the hub, httpx or hf_xet: they have no base in common
        why = (isinstance(error, RuntimeError) and error.__cause__) or error
        status = getattr(getattr(why, "response", None), "status_code", 0)
        kind = UserError if 400 <= status < 500 else AsyncrlError
        raise kind(
            f"the export is in {exported}, but was not uploaded to {name} at {hub.endpoint}: "
            f"{' '.join(str(why).split()).rstrip('.')}. The same command tries again"
        ) from error
    if done is None:
        raise UserError(
            f"--private: {name} is there already and is public, so nothing was uploaded; make "
            f"it private or choose another name. The export is in {exported}"
        )
    return str(done.commit_url)


def model_of(checkpoint: Path, say: Callable[[str], None]) -> Path:
    """Return the model of a checkpoint `step-NNNNNN`, exported into the run's folder if needed.

    `say` shows a sentence to the user. Raises UserError if the checkpoint is damaged or of another
    format, or cannot be exported there.
    """
    place = default_place(checkpoint)
    try:
        if not is_export_of(place, checkpoint):
            say(f"exporting the model of {checkpoint} to {place}")
            _export(checkpoint, place, None)
    except CheckpointError as error:
        raise UserError(f"{error}. `asyncrl export` writes it elsewhere with --output") from error
    return place


def describe(exported: Path) -> str:
    """Describe an export for the terminal."""
    record = msgspec.json.decode(
        (exported / export_files.RECORD).read_bytes(), type=export_files.ExportRecord
    )
    total = sum(one.bytes for one in record.files.values())
    return f"step {record.policy_version}, {record.dtype}, {size(total)}"


def _export(checkpoint: Path, place: Path, dtype: str | None, *, adapter: bool = False) -> None:
    read_manifest(checkpoint)  # says that it is of another format before torch is imported
    import torch

    from asyncrl.trainer.checkpoint.export import export, export_adapter

    write = export_adapter if adapter else export
    write(checkpoint, place, getattr(torch, dtype) if dtype else None)
