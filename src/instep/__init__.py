"""instep runs the optimizer step inside backward, with numbers bit for bit those of the plain loop."""

from instep._version import __version__ as __version__
from instep.attachment import Attachment as Attachment
from instep.attachment import attach as attach
from instep.attachment import attached as attached
from instep.verify import Verification as Verification
from instep.verify import verify as verify
