"""`kvq submit FOLDER name="A Name" licence=CC-BY-4.0`: another person's records, checked and added to the leaderboard.

A folder is taken whole or not at all: records that can be read, of this version, whose keys name their settings, on
texts that are known here, with the canaries `identity` and `zero` in every protocol.
"""

from __future__ import annotations

if __name__ == "__main__":
    from kvq.entry import enter

    enter("kvq.recommend.submit")

from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvq.errors import ConfigError, RecordError
from kvq.report.command import answered, given_words
from kvq.report.labels import named
from kvq.results import Record, Store, is_stale
from kvq.results.files import safe, write_file

SUBMISSIONS, ABOUT = "submissions", "about.json"
SAME, OTHER = 1e-6, 0.05
"""Largest mean KL of `identity`, and least of `zero`, in nats per token."""
_USAGE = """Check somebody's records and add them to the leaderboard under a name and a licence.

  kvq submit FOLDER name="A Name" licence=CC-BY-4.0 [results=results]

FOLDER holds runs/ with the records, among them method=identity and method=zero of every protocol.
"""


class About(BaseModel):
    """Whose records they are, and under which licence."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=80)
    licence: str = Field(min_length=1, max_length=40)


def checked(submitted: Store, known: Store) -> list[Record]:
    """The records of a submission.

    Raises:
        RecordError: the first reason to refuse it.
    """
    records, broken = submitted.scan()
    if broken:
        raise RecordError(f"{broken[0].path.name}: {broken[0].reason}")
    if not records:
        raise RecordError(f"no records under '{submitted.runs}'")
    texts = {record.provenance.dataset_fingerprint for record in known.scan()[0]}
    protocols: dict[str, dict[str, Record]] = {}
    for record in records:
        if record.status != "done":
            raise RecordError(f"{named(record)}: {record.status}: {record.reason or 'not done'}")
        if is_stale(record):
            raise RecordError(f"{named(record)}: measured by another version of its parts; measure it again")
        if record.provenance.dataset_fingerprint not in texts:
            raise RecordError(f"{named(record)}: the text of dataset={record.dataset} is none that is known here")
        submitted.samples_of(record)
        if record.baseline_key is not None:
            if submitted.get(record.baseline_key) is None:
                raise RecordError(f"{named(record)}: its full-precision run is not in the submission")
            protocols.setdefault(record.baseline_key, {})[record.method] = record
    if not protocols:
        raise RecordError("only full precision; no method is in the submission")
    for own in protocols.values():
        _check_canaries(own)
    return records


def _check_canaries(runs: dict[str, Record]) -> None:
    """`identity` is full precision and `zero` is far from it, or the cache was not read."""
    about = next(iter(runs.values()))
    for name in ("identity", "zero"):
        if name not in runs:
            raise RecordError(
                f"{about.task} on {about.model}, {about.dataset}: no run of method={name} beside the others"
            )
        if "kl_mean" not in runs[name].metrics:
            raise RecordError(f"method={name}: its record has no KL to full precision")
    same, other = runs["identity"].metrics["kl_mean"], runs["zero"].metrics["kl_mean"]
    if same > SAME:
        raise RecordError(f"method=identity: KL {same:g} to full precision, more than {SAME:g}: something else differs")
    if other < OTHER:
        raise RecordError(f"method=zero: KL {other:g} to full precision, less than {OTHER:g}: the cache is not read")


def add(submitted: Store, known: Store, about: About) -> Path:
    """Check a submission and copy its records under `submissions/`; its folder.

    Raises:
        RecordError: a reason to refuse it, or another submission of this name.
    """
    records = checked(submitted, known)
    folder = known.root / folder_of(about)
    if folder.exists():
        raise RecordError(f"{folder}: there is a submission of this name; remove it or choose another")
    target = Store(folder)
    for record in records:
        target.put(record, submitted.samples_of(record))
    try:  # last: a folder without it is no submission
        write_file(folder / ABOUT, f"{about.model_dump_json(indent=2)}\n".encode())
    except OSError as error:
        raise RecordError(f"{folder}: cannot be written: {error.strerror}") from error
    return folder


def folder_of(about: About) -> Path:
    """Folder of a submission in a results folder."""
    return Path(SUBMISSIONS, safe(about.name))


def submissions(root: Path) -> Iterator[tuple[About, Store]]:
    """All submissions of a results folder, by name; other folders are left out."""
    for path in sorted((root / SUBMISSIONS).glob(f"*/{ABOUT}")):
        try:
            yield About.model_validate_json(path.read_bytes()), Store(path.parent)
        except (OSError, ValidationError):
            continue


def _answer(words: list[str]) -> int:
    folder, given = _given(words)
    try:
        about = About(name=given["name"], licence=given["licence"])
    except ValidationError as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    try:
        added = add(Store(folder), Store(given.get("results", "results")), about)
    except RecordError as error:
        raise RecordError(f"refused: {error}") from error
    print(f"{added}: {len(Store(added).scan()[0])} records; kvq leaderboard shows them")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Add a submission and return 0; 1: it is refused; 2: a question that cannot be answered."""
    return answered(arguments, _USAGE, _answer, RecordError)


def _given(words: Sequence[str]) -> tuple[str, dict[str, str]]:
    folders = [word for word in words if "=" not in word]
    given = given_words([word for word in words if word not in folders], ("name", "licence", "results"))
    if len(folders) != 1 or {"name", "licence"} - given.keys():
        raise ConfigError("submit: needs one folder, name= and licence=; --help says the rest")
    return folders[0], given
