"""The images: what they install, as whom they run, and which decoders of video they have."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
import tomllib
from pathlib import Path

import orjson
import pytest
from aiohttp import web
from support.check_programs import run_check
from support.paths import ROOT
from support.time_limits import WITHIN_S

from supply.locks import FOLDER, PYTHON

IMAGES = sorted((ROOT / "deploy/images").glob("*.Containerfile"))
BUILD_FFMPEG = ROOT / "deploy/images/build_ffmpeg.sh"
DECODER = ROOT / "worker/duplane/worker/video/decoder.py"
HEALTH_PORT = 8080

each_image = pytest.mark.parametrize("image", IMAGES, ids=[image.stem for image in IMAGES])


def instructions(image: Path) -> list[str]:
    """Return the instructions of a Containerfile, each on one line, without comments."""
    lines = [line for line in image.read_text().splitlines() if not line.startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line]


def health_check(image: Path) -> list[str]:
    (found,) = [line for line in instructions(image) if line.startswith("HEALTHCHECK ")]
    return orjson.loads(found.partition(" CMD ")[2])


def test_there_are_an_image_of_the_edge_and_one_of_the_worker() -> None:
    assert [image.stem for image in IMAGES] == ["edge", "worker"]


@pytest.mark.slow
def test_the_containerfiles_have_no_known_mistake() -> None:
    run_check("hadolint", *IMAGES)


@each_image
def test_the_python_is_that_of_the_locks_and_the_processes_are_not_root(image: Path) -> None:
    found = instructions(image)
    assert f"ARG BASE=docker.io/library/python:{PYTHON}-slim-trixie" in found
    assert [line for line in found if line.startswith("USER ")] == ["USER 10001:10001"]
    assert 'ENTRYPOINT ["duplane"]' in found


@each_image
def test_packages_are_installed_by_locks_that_exist(image: Path) -> None:
    text = " ".join(instructions(image))
    for command in re.findall(r"bin/pip [^&;]*", text):
        from_lock = "--require-hashes" in command
        assert from_lock or "--no-deps" in command, command
    locks = re.findall(r"deploy/locks/([\w${}-]+)\.txt", text)
    for build in ("cpu", "cuda"):
        for lock in locks:
            assert (FOLDER / f"{lock.replace('${TORCH}', build)}.txt").exists()


@each_image
def test_the_wheel_is_built_from_all_of_its_sources(image: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {
        path.partition("/")[0]
        for path in project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    }
    needed |= {  # a link is as good as what it leads to
        str(link.resolve().relative_to(ROOT)).partition("/")[0]
        for link in (ROOT / "tools/duplane").iterdir()
    }
    needed |= {"pyproject.toml", project["project"]["readme"]}
    needed |= set(project["project"]["license-files"])
    copied = {
        source
        for line in instructions(image)
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert needed <= copied
    for source in needed & copied:
        for link in (path for path in (ROOT / source).rglob("*") if path.is_symlink()):
            target = link.resolve()
            assert any(target.is_relative_to(ROOT / name) for name in copied), link
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for source in copied:
        assert (ROOT / source.replace("${TORCH}", "cpu")).exists()
        assert any(source.startswith(line[1:]) for line in ignored if line.startswith("!")), source


@each_image
@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
async def test_the_health_check_asks_livez(image: Path, status: int, code: int) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=status)

    app = web.Application()
    app.router.add_get("/{path}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        program, *arguments = health_check(image)
        assert program == "python"
        checking = await asyncio.create_subprocess_exec(
            sys.executable,
            *(argument.replace(str(HEALTH_PORT), str(port)) for argument in arguments),
        )
        assert await asyncio.wait_for(checking.wait(), WITHIN_S) == code
    finally:
        await runner.cleanup()
    assert asked == ["/livez"]


@each_image
def test_the_processes_listen_where_the_health_check_asks(image: Path) -> None:
    (environment,) = [line for line in instructions(image) if line.startswith("ENV ")]
    values = dict(item.split("=", 1) for item in shlex.split(environment)[1:])
    assert values["DUPLANE_HEALTH_LISTEN"] == f"127.0.0.1:{HEALTH_PORT}"
    assert f"'127.0.0.1', {HEALTH_PORT}" in health_check(image)[-1]


def test_ffmpeg_has_the_formats_and_decoders_that_the_worker_allows_and_no_others() -> None:
    decoder = DECODER.read_text()
    formats = re.findall(r'^_FORMATS = "(.*)"', decoder, re.MULTILINE)[0].split(",")
    text = re.findall(r"^_CODECS = \((.*?)\n\)", decoder, re.MULTILINE | re.DOTALL)[0]
    codecs = "".join(re.findall(r'"(.*)"', text)).split(",")
    script = BUILD_FFMPEG.read_text()

    def listed(name: str) -> set[str]:
        parts = re.findall(rf"^{name}=(.*)$", script, re.MULTILINE)
        return {part for part in ",".join(parts).split(",") if part != f"${name}"}

    # One demuxer has the formats mov and mp4, one has matroska and webm.
    assert listed("DEMUXERS") == set(formats) - {"mp4", "webm"}
    # FFmpeg's own decoder of Opus is used.
    assert listed("DECODERS") == set(codecs) - {"libopus"}
    assert "--enable-gpl" not in script
    assert "--enable-encoder" not in script
