"""Opens the web page of a run (`asyncrl.web`) and records its address."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import UserError
from asyncrl.launch.records import ProcessRecords
from asyncrl.runs.directory import RunDirectory
from asyncrl.web.serving import WebPage


@dataclass(frozen=True, slots=True)
class Page:
    """The page of a run; `opened` is None with `monitoring.web.enabled: false`."""

    directory: RunDirectory
    opened: WebPage | None

    async def close(self) -> None:
        """End its process; the caller writes the run's state. Idempotent."""
        if self.opened is not None:
            await self.opened.close()
            self.directory.state.web = ""


def open_page(
    config: RunConfig,
    directory: RunDirectory,
    records: ProcessRecords,
    say: Callable[[str], None],
    closing: AsyncExitStack,
) -> Page:
    """Open the page. Raises UserError if its address or token file is unusable.

    A resumed run continues without a page if its port has been taken: it may be unattended.
    """
    settings = config.monitoring.web

    def given_up(why: str) -> None:
        directory.state.web = ""
        directory.write_state()
        say(why)

    opened = None
    try:
        if settings.enabled:
            opened = WebPage(settings, directory.path, records, given_up)
    except UserError as error:
        if not directory.state.start:
            raise
        say(f"{error}. The run is resumed without a web page")
    page = Page(directory, opened)
    closing.push_async_callback(page.close)
    if opened is not None:
        directory.state.web = opened.url
        directory.write_state()
        say(f"web page: {opened.url} (`asyncrl web` prints a link that may give orders)")
    return page
