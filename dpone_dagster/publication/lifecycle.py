"""The lifecycle of a governed publication, once, in order; both routes walk it (spec G, "Runtime lifecycle").

A route is a way from a source into a target: a manifest's load (``publication.load_route``) or a mart's semantic
refresh (``publication.path``), whose EXCHANGE is one of the finalizers. Steps 1 to 3 (parse, validate, identity) come
before a route exists. Three things are decided here and nowhere else:

- nothing before ``finalize`` changes what a reader sees, so every failure there is closed and can be tried again;
- ``finalize`` settles its own outcome, or leaves it recorded as unknown: nobody here guesses;
- after it nothing is undone: what fails is finished forward.
"""

from typing import NoReturn, Protocol, TypeVar

from dpone_dagster.errors import DponeError

R_co = TypeVar("R_co", covariant=True)


class Route(Protocol[R_co]):
    """One attempt to publish. A step that does not belong to a route does nothing there.

    Attributes:
        staged: whether the rows wait in staging until ``finalize``; otherwise ``finalize`` writes into the target, and
            gates can only judge what a reader sees already (``legacy_post_finalize``).
    """

    staged: bool

    def pre_hooks(self) -> None:
        """Step 4: run the hooks before the extraction."""

    def extract(self) -> None:
        """Step 5: settle what is read, and build it."""

    def stage(self) -> None:
        """Step 6: put the rows where the sink can judge them."""

    def project(self) -> None:
        """Step 7: add the lineage columns."""

    def gate(self) -> None:
        """Step 8: evaluate every gate, then refuse if one of them blocks."""

    def accept_before(self) -> None:
        """Step 9: check that what is asked for can be measured; measure source and staging."""

    def prepare(self) -> None:
        """Build and prove what ``finalize`` swaps in, and make the intent durable."""

    def finalize(self) -> None:
        """Step 10: change the target, and settle what came of it."""

    def accept_after(self) -> None:
        """Step 11: measure the target."""

    def clean(self) -> None:
        """Step 12: drop what was staged."""

    def persist(self) -> None:
        """Step 13: move the source state."""

    def post_hooks(self) -> None:
        """Step 14: run the hooks after the load."""

    def complete(self) -> R_co:
        """Step 15: close it."""

    def failed_before_finalize(self, error: BaseException) -> BaseException:
        """Close the attempt; return what is raised."""

    def failed_after_finalize(self, error: BaseException) -> BaseException:
        """Record where it stopped; return what is raised."""


def run(route: Route[R_co]) -> R_co:
    """Walk the whole lifecycle.

    Raises:
        BaseException: what the route's ``failed_..`` returns, or what ``finalize`` raises.
    """
    try:
        route.pre_hooks()
        route.extract()
        if route.staged:
            route.stage()
            route.project()
            route.gate()
        route.accept_before()
        route.prepare()
    except BaseException as error:  # noqa: BLE001 - raised again, or what is to be raised in its place
        # Interrupts included: whatever stopped us, first establish where the engines stand.
        raise_in_place_of(error, route.failed_before_finalize(error))
    route.finalize()
    return finish(route)


def finish(route: Route[R_co]) -> R_co:
    """Walk on from a target that has changed; also what a later run does with what an earlier one left."""
    try:
        if not route.staged:
            route.gate()
        route.accept_after()
        route.clean()
        route.persist()
        route.post_hooks()
        return route.complete()
    except BaseException as error:  # noqa: BLE001 - as above
        raise_in_place_of(error, route.failed_after_finalize(error))


def raise_in_place_of(error: BaseException, failure: BaseException) -> NoReturn:
    """Raise what a route makes of an error; only a refusal is shown as its cause, since others may carry row values."""
    if failure is error:
        raise error
    raise failure from (error if isinstance(error, DponeError) else None)
