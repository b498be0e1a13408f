"""Each call that deletes, truncates, renames or overwrites says why its target is shardwise's own; read from the source."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "shardwise"

#: Functions of ``os`` and ``shutil``, called or handed to another function.
_OF_SYSTEM = {
    "os": {
        "unlink",
        "remove",
        "rmdir",
        "removedirs",
        "truncate",
        "ftruncate",
        "rename",
        "renames",
        "replace",
    },
    "shutil": {"rmtree", "move"},
}
#: Flags with which a file is opened to be written.
_FLAGS = {"O_TRUNC", "O_CREAT", "O_WRONLY", "O_RDWR", "O_APPEND"}
#: Our own functions that delete what they are given.
_OWN = {"remove_tree", "remove_ours", "delete_all", "delete_below", "discard_in_store"}
#: Methods of paths, files and object stores.
_METHODS = {"unlink", "rmdir", "truncate", "rename", "write_text", "write_bytes", "delete"}

#: By file, function and call: why the target is ours, or why the caller wants just that.
REASONS = {
    "checkpoint/save.py::_link_weights os.unlink": "hard links that this call made in its own temporary directory",
    "checkpoint/sites.py::opened remove_ours": "the view that this call made, under a fresh name",
    "publish/sites.py::meet os.open": "a new file (O_EXCL), with a nonce in its name",
    "publish/sites.py::meet.remove os.unlink": "the probe that this rank has just made, with a nonce in its name",
    "checkpoint/held.py::MemorySteps.opened remove_tree": "the view that this call made, under a name that the ring drew",
    "checkpoint/sites.py::make_view .truncate": "a file that the line above made (x)",
    "checkpoint/sites.py::make_view open x2": "new files (x) in a new directory",
    "cli/program.py::_stop_writing os.open": "/dev/null",
    "demo/train.py::plan_starts .write_text": "a file of the demo, in a directory with its marker",
    "demo/course.py::Course.write .write_text": "a file of the demo, in a directory with its marker",
    "demo/course.py::clear_output .unlink": "names of the demo, in a directory with its marker",
    "demo/course.py::clear_output .write_text": "the marker, in a directory that was empty or has it",
    "demo/course.py::clear_output shutil.rmtree": "names of the demo, in a directory with its marker; links are unlinked",
    "demo/run.py::torchrun open": "a file of the demo, to which it appends",
    "demo/run.py::_finish .write_text": "a file of the demo, in a directory with its marker",
    "demo/run.py::run_demo .write_text": "a file of the demo, in a directory with its marker",
    "demo/train.py::Record.digests .write_text": "a file of the demo, in a directory with its marker",
    "demo/train.py::Record.loss open": "a file of the demo, to which it appends",
    "demo/train.py::Record.error .write_text": "a file of the demo, in a directory with its marker",
    "doctor/files.py::look_at_bucket .delete": "objects that this call wrote, below a prefix with a nonce",
    "doctor/examine.py::_remove os.unlink": "an empty file under the name that doctor alone makes for a rank",
    "doctor/examine.py::_touch os.open": "O_CREAT alone: nothing is truncated or written",
    "doctor/files.py::_lock os.open": "in the folder that mkdtemp made",
    "doctor/files.py::_measure os.open": "in the folder that mkdtemp made",
    "doctor/files.py::_rename os.open": "in the folder that mkdtemp made",
    "doctor/files.py::_rename os.rename": "in the folder that mkdtemp made",
    "doctor/files.py::_rename os.replace": "in the folder that mkdtemp made",
    "doctor/files.py::_time_of_sync os.open": "in the folder that mkdtemp made",
    "doctor/files.py::_write_direct os.open": "in the folder that mkdtemp made",
    "doctor/files.py::delete_probes shutil.rmtree": "folders that mkdtemp made for probes of this process",
    "doctor/files.py::look_at_place shutil.rmtree": "the folder that mkdtemp made for this call",
    "models/classes.py::_write_header .truncate": "a file that the line above made (x)",
    "models/classes.py::_write_header open": "a new file (x) in the temporary directory of a plan",
    "publish/write.py::enlarge os.open": "a file that was just written in an export's own temporary directory",
    "publish/write.py::enlarge os.ftruncate": "the same file, to more than it has",
    "export/write.py::ToDirectory._make remove_ours": "the temporary directory that this call made",
    "export/write.py::ToDirectory.discard remove_ours": "the temporary directory that this export made",
    "export/write.py::publish_directory os.rename x2": "the temporary directory that this export made; rename replaces no directory with content",
    "export/write.py::publish_directory remove_ours": "with overwrite=True: what _not_of_an_export took for an earlier export, moved away as the new one appeared",
    "export/pipelines.py::write_pipeline.finish remove_ours": "models that this export wrote there, and that _move_in took out",
    "export/pipelines.py::_move_in os.replace": "both in the temporary directory that this export made",
    "export/pipelines.py::write_pipeline remove_ours": "the temporary directory that this export made",
    "export/write.py::_exchange os.rename x2": "the same, under a name with a nonce until the new one is there; and the new one",
    "export/write.py::publish_directory os.rmdir": "the empty directory that the caller gave to export into",
    "export/write.py::ToStore.discard discard_in_store": "below a prefix that was empty when this export claimed it",
    "integrations/accelerate.py::_in_the_way os.rmdir": "the empty directory that the caller gave to save into",
    "integrations/accelerate.py::_copy_of_hooks open": "in the temporary directory of this call",
    "integrations/_trainer_files.py::exported remove_ours": "the temporary directory that this call made",
    "integrations/_trainer_files.py::add_beside open": "in the temporary directory of an export",
    "integrations/_trainer_files.py::drop_empty_weights os.unlink": "in the folder that mkdtemp made, or that of an unfinished checkpoint",
    "integrations/_trainer_files.py::into_model os.rmdir": "an empty folder of the temporary directory of this call",
    "integrations/_trainer_files.py::into_model os.replace": "within the folder of an unfinished checkpoint",
    "integrations/_trainer_files.py::_merge os.replace": "save_model of Trainer replaces the files of its export in the caller's output_dir",
    "integrations/_trainer_files.py::move_into os.unlink": "weights of an earlier export, which save_model of Trainer replaces in the caller's output_dir",
    "integrations/_folders.py::CheckpointFolders.close os.unlink": "the lock that this process holds, which has its name still",
    "integrations/_folders.py::CheckpointFolders.remove delete_all": "checkpoints of ours by their manifest, or such as the program's own limit deletes",
    "integrations/_trainer_files.py::_fetch open": "in the folder that mkdtemp made",
    "operations/ledger.py::LedgerFile.__init__ os.open": "a new file (O_EXCL)",
    "publish/hosts.py::_into_file os.open": "a file of a view or a slot, no link (O_NOFOLLOW); units of ours are written into it",
    "publish/ring.py::open_below os.open": "a file of a slot or of a run directory that the caller names, no link (O_NOFOLLOW)",
    "publish/ring.py::Maps.of os.open": "a file of a slot, whose directory the ring drew by lot and made for this user alone",
    "publish/ring.py::_name_of os.unlink": "a link or another odd thing in place of memory-id, in the run directory that this run holds",
    "publish/write.py::replace_file os.replace": "the id of a directory, which was not there, or the record of the memory tier; this run holds the directory",
    "publish/ring.py::Ring.remove remove_tree": "slots of a ring, whose directory was drawn by lot and made for this user alone",
    "publish/ring.py::Ring.sweep_views remove_tree": "views below a ring, whose directory was drawn by lot and made for this user alone",
    "publish/ring.py::Slot.clear os.unlink": "the manifest of a slot of the ring",
    "publish/ring.py::Slot.keep_only os.unlink": "files of a slot of the ring that its manifest does not name",
    "publish/ring.py::Slot.remove remove_tree": "a slot of the ring",
    "publish/ring.py::Slot.room_for os.ftruncate": "a file of a slot of the ring, no link (O_NOFOLLOW)",
    "publish/ring.py::Slot.room_for os.open": "a file of a slot of the ring, no link (O_NOFOLLOW)",
    "publish/ring.py::write_whole open": "a new file (x)",
    "publish/ring.py::write_whole os.replace": "a file of a slot or of a view, by one that was just made",
    "publish/ring.py::write_whole os.unlink": "the file that this call made",
    "models/hub.py::_written .write_bytes": "in the folder that mkdtemp made",
    "models/hub.py::_written shutil.rmtree": "the folder that mkdtemp made for this process",
    "ranks/ranks.py::remove_tree os.rmdir x2": "below the directory that a caller gives, each of which is listed here",
    "ranks/ranks.py::remove_tree os.unlink x2": "below the directory that a caller gives, each of which is listed here; links are unlinked",
    "ranks/protocol.py::Agreement._payloads .delete": "keys in the process group's store, not files",
    "report/report.py::write_report .write_text": "the file that the caller names to write the report to",
    "storage/by_obstore.py::ObstoreStore.delete .delete": "the object that a caller gives, each of which is listed here",
    "publish/copy.py::_Copy._send os.unlink": "in the directory of an unfinished copy, which has our note",
    "publish/copy.py::_appear os.rename": "the directory of an unfinished copy, which has our note; rename replaces no directory with content",
    "publish/copy.py::_appear os.rmdir": "an empty folder in the directory of an unfinished copy, which has our note",
    "publish/copy.py::_appear os.unlink": "what an earlier copy left in the directory of an unfinished copy, which has our note",
    "publish/copy.py::_begun os.unlink": "links in the directory of an unfinished copy, which has our note",
    "publish/copy.py::discard_copy discard_in_store": "the prefix of a step in the mirror, with a name that the line drew for this copy",
    "publish/copy.py::discard_copy remove_ours": "directories of unfinished copies, which have our note",
    "publish/line.py::HeadLine._delete delete_below": "a step that the head of this run named, or a directory with a nonce that no head names and no other run's manifest is in",
    "publish/line.py::HeadLine._sweep .delete": "a probe with a nonce in its name, a day old",
    "publish/line.py::_HeadTarget._discard discard_in_store": "a directory with a nonce that this save drew",
    "publish/write.py::delete_below .delete": "below the prefix that a caller gives, each of which is listed here",
    "publish/write.py::discard_in_store delete_below": "below the prefix that a caller gives, each of which is listed here",
    "publish/write.py::refuse_without_conditions .delete": "the probe that this call made, with a nonce in its name",
    "publish/write.py::release .delete": "the claim that this save made (only if there was none)",
    "publish/line.py::DirectoryLine.remove delete_all": "steps of the run that holds the directory, by the run in their manifests",
    "publish/lock.py::DirectoryLock.__init__ os.open": "no link is followed, nothing truncated",
    "publish/lock.py::DirectoryLock._note_holder os.ftruncate": "a locked regular file that was empty, or begins as a lock file of ours",
    "publish/lock.py::remove_ours os.rmdir": "what a caller gives, each of which is listed here",
    "publish/lock.py::remove_ours os.unlink x2": "what a caller gives, each of which is listed here",
    "publish/lock.py::remove_ours remove_tree": "what a caller gives, each of which is listed here",
    "publish/lock.py::unmark os.unlink": "our note",
    "publish/places.py::delete_part os.rename": "a temporary directory of this save, or a sealed part under a name with a nonce and with our manifest",
    "publish/places.py::delete_part remove_ours": "the same, under its name of trash",
    "publish/places.py::appear os.rename": "the temporary directory of a save; the final name was not there, and rename replaces no directory with content",
    "publish/places.py::discard os.rename": "a directory, no link, that delete_all has found to be a checkpoint of ours",
    "publish/places.py::discard remove_ours": "the same, under its name of trash",
    "publish/places.py::make_marked remove_ours": "the directory that this call made",
    "publish/places.py::set_aside os.rename": "a step-N of the run that holds the directory; it keeps its content under a name with a nonce",
    "publish/places.py::sweep_leftovers remove_ours": "names with a nonce whose directory has our note or manifest, or whose file is of our making (is_ours)",
    "publish/places.py::write_hint os.replace": "the hint latest, if it is none of another program's",
    "publish/places.py::write_hint os.unlink": "the file that this call made",
    "publish/places.py::DirectoryTarget._discard remove_ours": "the temporary directory that this save made",
    "publish/places.py::ObjectTarget._discard discard_in_store": "below a prefix that was empty when this save claimed it",
    "publish/write.py::FileWriter.__enter__ os.open": "a new file (O_EXCL)",
    "publish/write.py::FileFiller._direct_fd os.open": "the same; nothing is truncated",
    "publish/write.py::_opened os.open": "a file of this export's own temporary directory; nothing is truncated",
    "engine/shared.py::NodeReader._map os.open": "memory that a rank of this load shares",
    "engine/shared.py::NodeReader._share os.ftruncate": "memory that this load made (memfd)",
}


def _operations(node: ast.AST) -> Iterator[str]:
    """What a node of the syntax tree does, if it is one of these."""
    match node:
        case ast.Attribute(value=ast.Name(id=module), attr=name) if name in _OF_SYSTEM.get(module, ()):
            yield f"{module}.{name}"
        case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in _FLAGS:
            yield "os.open"
        case ast.Call(func=ast.Name(id="open") | ast.Attribute(attr="open")):
            words = [
                a.value
                for a in (*node.args, *(k.value for k in node.keywords))
                if isinstance(a, ast.Constant)
            ]
            if any(isinstance(w, str) and len(w) < 4 and set(w) & set("wax+") for w in words):
                yield "open"
        case ast.Call(func=ast.Attribute(attr="replace"), args=[_], keywords=[]):
            yield ".replace"
        case ast.Attribute(attr=name) if name in _METHODS:
            yield f".{name}"
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in _OWN and isinstance(node.ctx, ast.Load):
            yield name


def _found_in(tree: ast.AST, where: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        inner = where
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = f"{where}{'' if where.endswith('::') else '.'}{node.name}"
        for operation in _operations(node):
            yield f"{inner} {operation}"
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("os", "shutil")
        ):
            continue
        yield from _found_in(node, inner)


def _all_found() -> set[str]:
    """By file, function and call, as in ``REASONS``: of several equal calls in a function how many there are."""
    found = Counter[str]()
    for path in sorted(SOURCE.rglob("*.py")):
        found += Counter(_found_in(ast.parse(path.read_text()), f"{path.relative_to(SOURCE).as_posix()}::"))
    return {
        key if count == 1 or key.endswith(" os.open") else f"{key} x{count}" for key, count in found.items()
    }


def test_every_deletion_says_why_its_target_is_ours() -> None:
    found = _all_found()
    assert found - REASONS.keys() == set(), (
        "new: give a reason, or delete nothing that may be another program's"
    )
    assert REASONS.keys() - found == set(), "gone: take it out of the list"


def test_deletions_are_seen_however_they_are_written() -> None:
    source = """
class Place:
    def tidy(self, path, store):
        patiently(os.unlink, path)
        os.unlink(path)
        shutil.rmtree(path)
        path.unlink()
        path.replace(path)
        store.delete(path)
        with open(path, "w") as file:
            file.truncate(3)
        os.open(path, os.O_WRONLY | os.O_TRUNC)
        text.replace("a", "b"), names.remove(path), open(path, "rb")
"""
    found = Counter(_found_in(ast.parse(source), "x.py::"))
    ways = "os.unlink os.unlink shutil.rmtree .unlink .replace .delete open .truncate os.open os.open"
    assert found == Counter(f"x.py::Place.tidy {way}" for way in ways.split())
