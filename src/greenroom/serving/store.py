"""Videos on their way and finished ones on disk, until they are fetched, deleted or too old."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from greenroom.engine import Job, OmniResult
from greenroom.engine.media import as_picture, write_frames, write_image, write_video
from greenroom.serving.errors import ApiError, as_api_error
from greenroom.serving.metrics import Metrics
from greenroom.serving.schemas import VideoCreation
from greenroom.serving.settings import ServerSettings


class StoredVideo:
    """One video: its request, its state and its files."""

    def __init__(self, words: VideoCreation, folder: Path) -> None:
        self.id = f"video_{uuid.uuid4().hex}"
        self.job: Job = None  # type: ignore[assignment] # set before anybody sees the video
        self.words = words
        self.folder = folder / self.id
        self.files: dict[str, Path] = {}
        self.created_at = int(time.time())
        self.completed_at: int | None = None
        self.expires_at: int | None = None
        self.error_message: str | None = None
        self.error_code: str | None = None
        self.size = words.size or ""
        self.seconds = words.seconds
        self.seed: int | None = None
        self.metrics: dict[str, Any] | None = None

    @property
    def status(self) -> str:
        """As OpenAI's clients know it: queued, in_progress, completed or failed."""
        if self.error_message is not None:
            return "failed"
        if self.completed_at is not None:
            return "completed"
        return "queued" if self.job.state == "queued" else "in_progress"

    def to_dict(self, model: str) -> dict[str, Any]:
        error = None
        if self.error_message is not None:
            error = {"code": self.error_code or "failed", "message": self.error_message}
        return {
            "id": self.id,
            "object": "video",
            "model": model,
            "status": self.status,
            "progress": 100 if self.status == "completed" else int(99 * self.job.progress),
            "phase": self.job.phase,
            "created_at": self.created_at,
            "completed_at": self.completed_at,
            "expires_at": self.expires_at,
            "prompt": self.words.prompt,
            "seconds": f"{self.seconds:g}" if self.seconds else "",
            "size": self.size,
            "error": error,
            "remixed_from_video_id": None,
            "seed": self.seed,
            "metrics": self.metrics,
        }


class VideoStore:
    """The videos of one server, in a folder of its own that goes with it."""

    def __init__(self, settings: ServerSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._folder = Path(tempfile.mkdtemp(prefix="greenroom-videos-"))
        self._videos: dict[str, StoredVideo] = {}
        self._lock = threading.Lock()
        # Encoding is not the worker's business: the device would wait for it.
        self._encoder = ThreadPoolExecutor(1, "greenroom-encoder")
        self._encoding: set[Future[None]] = set()

    def add(self, submit: Callable[[], Job], words: VideoCreation) -> StoredVideo:
        """Keeps a place for a video and submits its request.

        Raises:
            ApiError: 429, as many videos as allowed are kept and none of them is finished.
        """
        video = StoredVideo(words, self._folder)
        with self._lock:
            leaving = self._leaving()
            video.job = submit()
            # Not before: a request that is refused takes nobody's video away.
            if leaving is not None:
                del self._videos[leaving.id]
                shutil.rmtree(leaving.folder, ignore_errors=True)
            self._videos[video.id] = video
        video.job.future.add_done_callback(lambda _: self._encode_later(video))
        return video

    def get(self, video_id: str) -> StoredVideo:
        """Raises ApiError 404 where there is none."""
        video = self._videos.get(video_id)
        if video is None:
            raise ApiError(404, f"there is no video {video_id[:100]!r}", param="video_id", code="not_found")
        return video

    def all(self, *, newest_first: bool) -> list[StoredVideo]:
        videos = list(self._videos.values())
        return videos[::-1] if newest_first else videos

    def remove(self, video: StoredVideo) -> None:
        """Forgets a video and deletes its files; a file that is being sent stays readable for its reader."""
        with self._lock:
            self._videos.pop(video.id, None)
        shutil.rmtree(video.folder, ignore_errors=True)

    def clean_up(self) -> None:
        """Removes what is too old."""
        now = time.time()
        for video in list(self._videos.values()):
            if video.expires_at is not None and video.expires_at <= now:
                self.remove(video)

    def close(self, timeout_s: float | None = None) -> None:
        """Cancels what runs and deletes every file.

        Args:
            timeout_s: how long to wait for a video that is being encoded; None for as long as it takes.
        """
        for video in list(self._videos.values()):
            video.job.cancel("the engine is shutting down")
        self._encoder.shutdown(wait=False, cancel_futures=True)
        wait(list(self._encoding), timeout_s)
        self._videos.clear()
        self.delete_files()

    def delete_files(self) -> None:
        """Deletes every file, whoever still needs it."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _leaving(self) -> StoredVideo | None:
        """The oldest finished video where one has to go for a new one.

        Raises:
            ApiError: 429, there is none.
        """
        if len(self._videos) < self._settings.max_videos:
            return None
        finished = next((v for v in self._videos.values() if v.expires_at is not None), None)
        if finished is None:
            raise ApiError(
                429,
                f"{len(self._videos)} videos are being made; accepted: at most {self._settings.max_videos}",
                code="queue_full",
                headers={"Retry-After": "10"},
            )
        return finished

    def _encode_later(self, video: StoredVideo) -> None:
        with contextlib.suppress(RuntimeError):  # the store was closed
            future = self._encoder.submit(self._finish, video)
            self._encoding.add(future)
            future.add_done_callback(self._encoding.discard)

    def _finish(self, video: StoredVideo) -> None:
        try:
            result = video.job.future.result()
            self._write(video, result)
        except Exception as error:
            told = as_api_error(error)
            video.error_code, video.error_message = told.code, told.message
            self._metrics.failed("video", error)
        finally:
            video.expires_at = int(time.time() + self._settings.video_lifetime)
            # The frames are on disk; in memory they would stay for as long as the video is kept.
            video.job = _Ended.of(video.job)
            if video.id not in self._videos:
                shutil.rmtree(video.folder, ignore_errors=True)

    def _write(self, video: StoredVideo, result: OmniResult) -> None:
        frames = list(result.frames)
        video.folder.mkdir()
        names = {"video": "video.mp4", "thumbnail": "thumbnail.png", "frames": "frames.zip"}
        contents = {
            "video": write_video(frames, video.words.fps),
            "thumbnail": write_image(as_picture(frames[0])),
            "frames": write_frames(frames),
        }
        for kind, data in contents.items():
            path = video.folder / names[kind]
            path.write_bytes(data)
            video.files[kind] = path
        first = as_picture(frames[0])
        video.size = f"{first.width}x{first.height}"
        video.seconds = len(frames) / video.words.fps
        video.seed = result.seed
        video.metrics = vars(result.metrics)
        video.completed_at = int(time.time())
        self._metrics.finished("video", result.metrics, len(frames) * first.width * first.height * 3)


class _Ended(Job):
    """A job that is over, without its result."""

    @classmethod
    def of(cls, job: Job) -> Job:
        ended = cls(job.request)
        ended.request.inputs.clear()
        ended.state, ended.phase, ended.step, ended.steps = job.state, job.phase, job.step, job.steps
        ended.future.set_result(None)  # type: ignore[arg-type]
        return ended
