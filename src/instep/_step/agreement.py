"""Whether a step is taken, where its gradients may hold NaN or infinity: all ranks give one answer."""

from instep._gradients.finite import Named, Policy, ask_if_finite, nonfinite_error
from instep._ranks.votes import StepVotes


class Agreement:
    """
    Attributes:
        policy: ``"allow"`` asks nobody.
    """

    def __init__(self, policy: Policy, votes: StepVotes) -> None:
        self.policy = policy
        self._votes = votes

    def takes_step(self, number: int, gradients: Named) -> bool:
        """Whether step ``number``, with these gradients of this rank, is taken. All ranks must ask; waits for them.

        Raises:
            NonFiniteGradientError: the policy is ``"raise"``, and a gradient of some rank is not finite.
        """
        if self.policy == "allow":
            return True
        rank = ask_if_finite(gradients, self._votes, number)
        if rank is not None and self.policy == "raise":
            raise nonfinite_error(gradients, rank, "Nothing of the step was applied")
        return rank is None
