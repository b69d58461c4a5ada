"""The pages of the console. Each shows and changes only what belongs to projects of the key that logged in."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from flask import Blueprint, Response, g, redirect, render_template, request, url_for
from redis import RedisError
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response as AnyResponse

from app.api.base import current_caller, needs, services
from app.console import account, charts, login, playground, projects
from app.console.confirmation import confirmation, is_confirmed
from app.console.failures import explain
from app.domain.curves import Step, by_step, curves, steps
from app.domain.limits import LONGEST_TTL_S
from app.domain.progress import NEWEST_POINTS, Progress
from app.errors import BadRequest, NotFound, OpError, RequestError
from app.ids import TinkerPath
from app.services.views import Page, day_text, size_text

blueprint = Blueprint("console", __name__, url_prefix="/console", template_folder="templates", static_folder="static")
login.add(blueprint)
account.add(blueprint)
playground.add(blueprint)
projects.add(blueprint)

_PAGE_RUNS, _PAGE_CHECKPOINTS, _MOST_CALLS = 25, 50, 100
_MOST_POINTS, _MOST_COLUMNS = 1000, 256
_MOST_COMPARED = 8
_DAY_S = 86_400
_MOST_DAYS = LONGEST_TTL_S // _DAY_S
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


@blueprint.after_request
def protect(response: Response) -> Response:
    """Lets the browser load nothing from elsewhere, and keep no page of a user who has left."""
    response.headers["Content-Security-Policy"] = _POLICY
    response.headers["Referrer-Policy"] = "same-origin"
    response.headers["X-Content-Type-Options"] = "nosniff"
    if request.endpoint != "console.static":
        response.headers["Cache-Control"] = "no-store"
    return response


@blueprint.context_processor
def helpers() -> dict[str, Any]:
    """The functions that the templates call, and whether the page is a user's."""
    return {
        "csrf_token": login.csrf_token,
        "number": charts.number,
        "size": size_text,
        "brief_id": _brief_id,
        "count": "{:,}".format,
        "decimal": _decimal,
        "day": day_text,
        "logged_in": "caller" in g,
    }


@blueprint.errorhandler(RequestError)
@blueprint.errorhandler(OpError)
@blueprint.errorhandler(RedisError)
def refused(error: RequestError | OpError | RedisError) -> tuple[str, int]:
    """The page of a request that cannot be served."""
    return _failed(*explain(error))


@blueprint.errorhandler(HTTPException)
def wrong_request(error: HTTPException) -> tuple[str, int]:
    """The page of an HTTP error, such as a form that is too old."""
    return _failed(error.description or error.name, error.code or 500)


def _failed(message: str, status: int) -> tuple[str, int]:
    """htmx shows the message alone, in the part that it loads again."""
    return render_template("error_part.html" if _is_part() else "error.html", message=message), status


@blueprint.get("")
@blueprint.get("/")
def home() -> AnyResponse:
    """The first page."""
    return redirect(url_for("console.runs"))


@blueprint.get("/<path:name>")
def no_page(name: str) -> AnyResponse:
    """Raises NotFound for an address without a page."""
    raise NotFound(f"the console has no page {name[:200]!r}")


@blueprint.get("/runs")
def runs() -> str:
    """The runs, newest first, with their progress. htmx loads the table alone every three seconds."""
    project = request.args.get("project") or None
    found, cursor = services().runs.list_states(current_caller(), "accessible", project, _page(_PAGE_RUNS))
    template = "runs_table.html" if _is_part() else "runs.html"
    progress = _progress(found, NEWEST_POINTS)
    return render_template(template, runs=found, cursor=cursor, progress=progress, now=_now())


@blueprint.get("/runs/<run>")
def show_run(run: str) -> str:
    """One run: its state, its curves and its checkpoints. htmx loads the curves alone every three seconds."""
    described = services().runs.describe_state(run, current_caller())
    (progress,) = _progress([described], _MOST_POINTS).values()
    (recorded,) = services().records.recorded([run])
    drawn = charts.charts({_brief_id(run): curves(steps(progress), recorded)})
    (holder,) = services().oplog.holders([run])
    shown = {"run": described, "progress": progress, "charts": drawn, "holder": holder, "now": _now()}
    if _is_part():
        return render_template("curves.html", **shown)
    checkpoints = services().runs.list_checkpoints(run, current_caller())
    is_admin = current_caller().may("admin", described["project_id"])
    return render_template("run.html", checkpoints=checkpoints, is_admin=is_admin, **shown)


@blueprint.get("/runs/<run>/curves.csv")
def download_curves(run: str) -> Response:
    """The steps that are kept of a run, with every value of them."""
    described = services().runs.describe_state(run, current_caller())
    (progress,) = _progress([described], _MOST_POINTS).values()
    (recorded,) = services().records.recorded([run])
    headers = {"Content-Disposition": "attachment; filename=curves.csv"}
    return Response(_curves_csv(steps(progress), by_step(recorded)), mimetype="text/csv", headers=headers)


def _curves_csv(of_trainer: Iterable[Step], of_client: Mapping[int, Mapping[str, float]]) -> str:
    """A line for each step, with what the trainer measured and the values of both."""
    found = {step.number: step for step in of_trainer}
    metrics = {
        number: {**(found[number].metrics if number in found else {}), **of_client.get(number, {})}
        for number in sorted(found.keys() | of_client.keys())
    }
    names = list(dict.fromkeys(name for its in metrics.values() for name in its))[:_MOST_COLUMNS]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("step", "unix_time", "tokens", "seconds", "loss", *names))
    for number, its in metrics.items():
        writer.writerow((number, *_measured(found.get(number)), *(its.get(name, "") for name in names)))
    return text.getvalue()


def _measured(step: Step | None) -> Sequence[object]:
    """The time, tokens, seconds and loss of a step; without values where only the client recorded something."""
    if step is None:
        return ("",) * 4
    return f"{step.at:.3f}", step.tokens, f"{step.seconds:.6f}", "" if step.loss is None else step.loss


@blueprint.get("/compare")
def compare() -> str:
    """The curves of several runs in the same charts."""
    newest, _ = services().runs.list_states(current_caller(), "accessible", None, Page(0, _PAGE_RUNS))
    asked = list(dict.fromkeys(request.args.getlist("run")))[:_MOST_COMPARED]
    described = [services().runs.describe_state(run, current_caller()) for run in asked]
    progress, recorded = _progress(described, _MOST_POINTS), services().records.recorded(asked)
    found = {
        _brief_id(run): curves(steps(one), its) for (run, one), its in zip(progress.items(), recorded, strict=True)
    }
    more = [run for run in described if run not in newest]
    return render_template("compare.html", runs=[*newest, *more], asked=asked, charts=charts.charts(found))


@blueprint.get("/checkpoints")
def checkpoints() -> str:
    """All checkpoints of the projects where the user works, newest first."""
    found = services().checkpoints.list_all(current_caller(), _page(_PAGE_CHECKPOINTS))
    return render_template("checkpoints.html", checkpoints=found["checkpoints"], cursor=found["cursor"])


@blueprint.get("/checkpoints/download")
def download() -> AnyResponse:
    """The archive of a checkpoint, through the same signed URL as the API's, on the address that the browser uses."""
    url, _ = services().archives.url(TinkerPath.parse(request.args.get("path", "")), current_caller())
    return redirect(urlsplit(url)._replace(scheme="", netloc="").geturl())


@blueprint.post("/checkpoints/publish")
@needs("manage")
def publish() -> AnyResponse:
    """Publishes a checkpoint, or makes it private again."""
    services().checkpoints.publish(_path(), current_caller(), public=request.form.get("public") == "yes")
    return _back()


@blueprint.post("/checkpoints/expiry")
@needs("manage")
def expire() -> AnyResponse:
    """Lets a checkpoint expire after some days, or never."""
    days = request.form.get("days")
    if days is not None and not (days.isdecimal() and len(days) <= len(str(_MOST_DAYS))):
        raise BadRequest(f"{days[:80]!r} is no number of days: give a whole number up to {_MOST_DAYS}")
    services().checkpoints.set_ttl(_path(), current_caller(), None if days is None else int(days) * _DAY_S)
    return _back()


@blueprint.post("/checkpoints/delete")
@needs("manage")
def delete() -> AnyResponse:
    """Deletes a checkpoint, once the user has confirmed it with a second press."""
    path = _path()
    if not is_confirmed():
        return confirmation(
            "Delete this checkpoint",
            of=path,
            effect="Its files are removed and cannot be restored.",
            label="Delete",
            back=url_for("console.checkpoints"),
        )
    services().checkpoints.delete(path, current_caller())
    return redirect(url_for("console.show_run", run=path.model_id))


@blueprint.get("/queue")
def queue() -> str:
    """The user's waiting calls with their places, and the workers with those of the user's newest runs that they hold.
    htmx loads the tables alone every two seconds."""
    calls = services().queue.list(current_caller(), Page(0, _MOST_CALLS))
    workers = sorted(services().bases.workers().items())
    template = "queue_tables.html" if _is_part() else "queue.html"
    runs, _ = services().runs.list_states(current_caller(), "accessible", None, Page(0, _MOST_CALLS))
    held = _held([run["training_run_id"] for run in runs])
    shown = {"calls": calls["calls"], "cursor": calls["cursor"], "workers": workers, "held": held}
    return render_template(template, **shown, now=_now())


def _held(runs: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """The runs that each worker holds in memory, by its node."""
    found: dict[str, list[str]] = {}
    for run, node in zip(runs, services().oplog.holders(runs), strict=True):
        found.setdefault(node, []).append(run)
    return found


def _page(size: int) -> Page:
    """The part of a list that the request asks for."""
    return Page(max(0, request.args.get("offset", 0, int)), size)


def _progress(runs: Sequence[Mapping[str, Any]], most_points: int) -> dict[str, Progress]:
    """The progress of each run that the user was shown."""
    names = [run["training_run_id"] for run in runs]
    return dict(zip(names, services().records.progress(names, most_points), strict=True))


def _is_part() -> bool:
    """True for a request of htmx, which replaces a part of the page."""
    return "HX-Request" in request.headers


def _now() -> float:
    return services().records.now()


def _path() -> TinkerPath:
    return TinkerPath.parse(request.form.get("path", ""))


def _back() -> AnyResponse:
    """Shows the run of the checkpoint, or the list that the form was in."""
    if request.form.get("to") == "checkpoints":
        return redirect(url_for("console.checkpoints"))
    return redirect(url_for("console.show_run", run=_path().model_id))


def _brief_id(run: str) -> str:
    """A run's id without the middle of its session's UUID."""
    session, _, rest = run.partition(":")
    return f"{session[:8]}:{rest}" if rest else run


def _decimal(amount: float) -> str:
    """Money or seconds with two decimals, or below 1 with its first digits."""
    return charts.number(amount) if 0 < amount < 1 else f"{amount:,.2f}"
