"""``random="keyed"``: a trial of an optimizer that may draw random numbers, on made-up parameters.

What one call draws serves its parameters in order. So only the first parameter of a call draws what it draws alone,
from generators in the same state. Each kind of parameter is in first place once.
"""

from collections.abc import Sequence

from instep._optim.calling import STEPPED_WHOLE
from instep._optim.made_up import Spec, Weather
from instep._optim.made_up_run import MadeUpRun
from instep._optim.trials import CannotBeTriedError, Trial, step_divided, step_together
from instep._optim.twins import different
from instep.errors import UnsupportedOptimizerError


class KeyedTrial(Trial):
    """Steps a parameter by itself, by its plain ``step()`` and as an attached loop does, and together with others."""

    def run(self, weather: Weather) -> None:
        """Take the steps of ``weather`` with each kind of parameter in first place.

        Raises:
            UnsupportedOptimizerError: a result differs, or the optimizer does what excludes a call by parameter.
        """
        self._step_all(weather)
        for number, mine in enumerate(self._runs.specs):
            for spec in dict.fromkeys(mine):
                self._try(weather, number, spec, [spec, next((one for one in mine if one != spec), spec)])

    def _step_all(self, weather: Weather) -> None:
        """What calls write beside parameters and their state must be the same for all of them."""
        plain, stepped = self._runs.anew(), self._runs.anew()
        for step in range(len(weather.scales)):
            gradients = self._runs.gradients(weather, step)
            try:
                step_together(self._name, plain, gradients)
            except CannotBeTriedError as error:
                self._fails(weather, error)
                return
            stepped.give(gradients)
            step_divided(self._name, stepped, "one by one")
        self.contained = self.contained and stepped.contained

    def _try(self, weather: Weather, number: int, spec: Spec, others: Sequence[Spec]) -> None:
        """
        Args:
            number: of the group.
            others: of the same group, to be stepped together with the first.
        """
        groups: list[list[Spec]] = [[] for _ in self._runs.specs]
        alone = [*groups[:number], [spec], *groups[number + 1 :]]
        plain, stepped = self._runs.anew(alone), self._runs.anew(alone)
        together = self._runs.anew([*groups[:number], [spec, *others], *groups[number + 1 :]])
        for step in range(len(weather.scales)):
            gradients = weather.gradients([spec, *others], step)
            try:
                step_together(self._name, plain, gradients[:1])
                step_together(self._name, together, gradients)
            except CannotBeTriedError as error:
                self._fails(weather, error)
                return
            stepped.give(gradients[:1])
            step_divided(self._name, stepped, "one by one")
            self.returns |= different(plain.returned, stepped.returned)
            when = f"step {step + 1} with {weather}"
            if (what := stepped.differs_from(plain)) is not None:
                raise UnsupportedOptimizerError(
                    f"{self._name} cannot be stepped by parameter: one that is stepped before step() gets other values "
                    f"than in step() (in {when}: {what}). Perhaps it draws random numbers elsewhere: random='keyed' "
                    f"seeds torch's default generators alone. {STEPPED_WHOLE}"
                )
            if (what := _first_differs(together, plain)) is not None:
                raise UnsupportedOptimizerError(
                    f"{self._name} couples parameters: stepped together with others, and drawing first, one gets other "
                    f"values than stepped by itself (in {when}: {what}). {STEPPED_WHOLE}"
                )
        self._require_finite(weather, plain.parameters)


def _first_differs(together: MadeUpRun, alone: MadeUpRun) -> str | None:
    mine, its = together.parameters[0], alone.parameters[0]
    what = f"a parameter of shape {tuple(mine.shape)}"
    if different(mine, its):
        return what
    if different(together.twin.state.get(mine), alone.twin.state.get(its)):
        return f"the state of {what}"
    return None
