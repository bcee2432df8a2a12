from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("instep")  # of git's last tag, when it was installed
except PackageNotFoundError:  # this folder was put on the path
    __version__ = "unknown"
