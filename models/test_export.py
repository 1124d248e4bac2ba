"""Tests of export.py: python -m unittest models/test_export.py (needs models/requirements.txt, no network).

Run by scripts/bench-exactness.sh. Models are tiny and have random weights.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import export  # noqa: E402
import onnxruntime  # noqa: E402
import timm  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402


class Exported(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def export(self, *args):
        """Runs the program; what it printed and what it ended with."""
        output = io.StringIO()
        with mock.patch.object(sys, "argv", ["export.py", *map(str, args), "--output", str(self.folder / "out")]):
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                try:
                    export.main()
                except SystemExit as end:
                    return output.getvalue(), end.code
        return output.getvalue(), None

    def file(self, name):
        return json.loads((self.folder / "out" / name).read_text())

    def save(self, name, network, processor):
        network.save_pretrained(self.folder / name)
        processor.save_pretrained(self.folder / name)
        return self.folder / name

    def test_names(self):
        folder = self.folder / "org"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        for name, expected in {
            "google/vit": ("transformers", "google/vit"),
            "hf/google/vit": ("transformers", "google/vit"),
            "timm/resnet18.a1_in1k": ("timm", "resnet18.a1_in1k"),
            "hf_hub:timm/resnet18": ("timm", "hf-hub:timm/resnet18"),
            "hf-hub:me/mine": ("timm", "hf-hub:me/mine"),
            str(folder): ("transformers", str(folder)),
        }.items():
            self.assertEqual(export.source(name), expected)
        for name in ["vit", "./nowhere", "/nowhere/at/all", "a/b/c"]:
            with self.assertRaises(export.ExportError):
                export.source(name)

    def test_a_folder_that_transformers_saved(self):
        config = transformers.MobileNetV2Config(num_labels=4, image_size=64)
        processor = transformers.MobileNetV2ImageProcessor(
            size={"shortest_edge": 72}, crop_size={"height": 64, "width": 64}
        )
        folder = self.save("ft", transformers.MobileNetV2ForImageClassification(config), processor)
        self.assertEqual(self.export(folder)[1], None)
        self.assertEqual(len(self.file("config.json")["id2label"]), 4)
        self.assertEqual(self.file("config.json")["transformers_version"], transformers.__version__)
        self.assertEqual(self.file("preprocessor_config.json")["image_processor_type"], "MobileNetV2ImageProcessor")

    def test_a_network_that_cannot_be_traced_is_exported_by_the_newer_exporter(self):
        config = transformers.Dinov2WithRegistersConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14, num_labels=3
        )
        side = {"height": 28, "width": 28}
        processor = transformers.BitImageProcessor(size={"shortest_edge": 28}, crop_size=side)
        folder = self.save("dino", transformers.Dinov2WithRegistersForImageClassification(config), processor)
        output, code = self.export(folder)
        self.assertEqual(code, None, output)
        self.assertIn("trying the newer exporter", output)
        self.assertNotIn("Traceback", output)
        session = onnxruntime.InferenceSession(self.folder / "out" / "model.onnx")
        for images in (1, 3):
            (logits,) = session.run(None, {"pixel_values": torch.rand(images, 3, 28, 28).numpy()})
            self.assertEqual(logits.shape, (images, 3))

    def test_a_checkpoint_of_timm(self):
        weights = self.folder / "best.pth"
        torch.save(timm.create_model("resnet10t", num_classes=3).state_dict(), weights)
        labels = self.folder / "names.txt"
        labels.write_text("ant\nbee\ncat\n")
        self.assertEqual(self.export("timm/resnet10t", "--checkpoint", weights, "--labels", labels)[1], None)
        self.assertEqual(self.file("config.json")["label_names"], ["ant", "bee", "cat"])
        labels.write_text("ant\nbee\n")
        _, error = self.export("timm/resnet10t", "--checkpoint", weights, "--labels", labels)
        self.assertIn("names 2 classes, and the model has 3", error)

    def test_what_is_missing_is_said_in_one_line(self):
        broken = self.folder / "broken.pth"
        broken.write_text("no weights")
        for args, words in [
            (["google/vit-nothing"], "failed to load google/vit-nothing"),
            (["timm/resnet10t"], "failed to load resnet10t"),
            (["hf_hub:timm/nothing"], "failed to load hf-hub:timm/nothing"),
            (["timm/resnet1"], "timm has no model resnet1; near it: resnet"),
            (["./nowhere"], "there is no such folder"),
            (["timm/resnet10t", "--checkpoint", broken], "holds no weights"),
            (["timm/resnet10t", "--checkpoint", "nowhere.pth"], "there is no such file"),
            (["google/vit", "--checkpoint", broken], "--checkpoint is for models of timm"),
        ]:
            output, error = self.export(*args)
            self.assertIn(words, str(error))
            self.assertTrue(str(error).startswith("export: "), error)
            self.assertNotIn("\n", str(error))
            self.assertNotIn("Traceback", output)

    def test_embeddings_with_their_tower_for_texts(self):
        import tokenizers

        words = {word: number for number, word in enumerate(["<pad>", "<end>", "<other>", "red", "cat"])}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<other>"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", model_max_length=16
        )
        small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        text = small | {"vocab_size": 8, "max_position_embeddings": 16, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 0}
        config = transformers.CLIPConfig(text_config=text, vision_config=small | {"image_size": 32, "patch_size": 8})
        processor = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
        folder = self.save("clip", transformers.CLIPModel(config), processor)
        fast.save_pretrained(folder)
        output, code = self.export(folder, "--embedding")
        self.assertIsNone(code, output)
        out = self.folder / "out"
        self.assertTrue((out / "tokenizer.json").exists())
        self.assertNotIn("id2label", self.file("config.json"))
        self.assertIn("logit-scale = 14.28", (out / "trommel.toml").read_text())
        for name, inputs in [("vision_model", ["pixel_values"]), ("text_model", ["input_ids", "attention_mask"])]:
            session = onnxruntime.InferenceSession(out / f"{name}.onnx")
            self.assertEqual([value.name for value in session.get_inputs()], inputs)
        output, code = self.export(folder, "--embedding", "--int8", "dynamic")
        self.assertIn("--embedding goes without", output)


if __name__ == "__main__":
    unittest.main()
