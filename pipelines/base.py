"""Pipelines of this package on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from diffusers.pipelines.pipeline_utils import DiffusionPipeline


class PublishablePipeline(DiffusionPipeline):
    """A pipeline whose `push_to_hub` uploads what others can load.

    diffusers' own method uploads components of our classes without the files through which `from_pretrained` finds
    them, and no card.
    """

    def push_to_hub(
        self,
        repo_id: str,
        *,
        token: str | None = None,
        private: bool | None = None,
        commit_message: str = "Upload model",
        endpoint: str | None = None,
        **save_options: Any,
    ) -> str:
        """Upload weights, configs and a model card, and return the commit's address.

        Args:
            repo_id: "user/name"; the repository is created where there is none.
            token: Access token; by default that of `hf auth login` or HF_TOKEN.
            private: Visibility of a new repository; None takes the account's default.
            commit_message: Of the upload.
            endpoint: Another Hub than the public one.
            save_options: Arguments of `save_pretrained`, for instance variant="fp16".
        """
        from marigold_uq.hub import push_to_hub

        with TemporaryDirectory() as folder:
            model = Path(folder) / repo_id.split("/")[-1]
            self.save_pretrained(model, **save_options)
            return push_to_hub(
                model, repo_id, token=token, private=private, commit_message=commit_message, endpoint=endpoint
            )
