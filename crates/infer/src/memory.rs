//! Available memory, and the largest batch that fits into it.

use std::fs;
use std::path::{Path, PathBuf};

/// Memory in use by this process in bytes, if the system reports it.
pub(crate) fn resident() -> Option<u64> {
    field(&fs::read_to_string("/proc/self/status").ok()?, "VmRSS:")
}

/// Additional memory that it may use: half of what the machine, or the process's control group if
/// that is less, has available, if the system reports it.
pub(crate) fn budget() -> Option<u64> {
    let available = field(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?;
    let left = ControlGroups::own().left();
    Some(left.unwrap_or(u64::MAX).min(available) / 2)
}

/// Memory limit of this process's container in bytes, if a control group limits it.
pub fn memory_limit() -> Option<u64> {
    ControlGroups::own().limit()
}

/// Mount point of control groups.
const MOUNT: &str = "/sys/fs/cgroup";

/// The control groups of this process, innermost first: each may limit its memory.
struct ControlGroups(Vec<ControlGroup>);

struct ControlGroup {
    dir: PathBuf,
    names: Names,
}

/// File names in a control group.
#[derive(Clone, Copy)]
struct Names {
    limit: &'static str,
    used: &'static str,
    /// The part of the memory in use that is page cache, which the system reclaims when needed.
    files: &'static str,
}

const FIRST: Names = Names {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    files: "total_inactive_file",
};
const SECOND: Names = Names {
    limit: "memory.max",
    used: "memory.current",
    files: "inactive_file",
};

impl ControlGroups {
    /// Those of this process; empty if it has none or they cannot be read.
    fn own() -> Self {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Self::of(Path::new(MOUNT), &own)
    }

    /// Those of a process whose `/proc/PID/cgroup` is `own`.
    fn of(mount: &Path, own: &str) -> Self {
        let mut groups = Vec::new();
        for line in own.lines() {
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
                continue;
            };
            let (base, names) = match controllers {
                "" => (mount.to_owned(), SECOND),
                some if some.split(',').any(|name| name == "memory") => {
                    (mount.join("memory"), FIRST)
                }
                _ => continue,
            };
            // In a container the path may be the host's: then only the mount itself exists.
            let dir = base.join(path.trim_start_matches('/'));
            let dirs = dir.ancestors().take_while(|dir| dir.starts_with(&base));
            groups.extend(dirs.map(|dir| ControlGroup {
                dir: dir.to_owned(),
                names,
            }));
        }
        Self(groups)
    }

    fn limit(&self) -> Option<u64> {
        self.0.iter().filter_map(ControlGroup::limit).min()
    }

    fn left(&self) -> Option<u64> {
        let left = |group: &ControlGroup| Some(group.limit()?.saturating_sub(group.used()?));
        self.0.iter().filter_map(left).min()
    }
}

impl ControlGroup {
    /// `None` if there is no limit: `max`, or more than any machine has.
    fn limit(&self) -> Option<u64> {
        const NONE: u64 = 1 << 60;
        self.number(self.names.limit).filter(|limit| *limit < NONE)
    }

    fn used(&self) -> Option<u64> {
        let stat = fs::read_to_string(self.dir.join("memory.stat")).unwrap_or_default();
        let files = stat.lines().find_map(|line| {
            let (name, value) = line.split_once(' ')?;
            (name == self.names.files).then(|| value.parse::<u64>().ok())?
        });
        let used = self.number(self.names.used)?;
        Some(used.saturating_sub(files.unwrap_or_default()))
    }

    fn number(&self, name: &str) -> Option<u64> {
        let text = fs::read_to_string(self.dir.join(name)).ok()?;
        text.trim().parse().ok()
    }
}

/// A line such as `VmRSS:   1024 kB`, in bytes.
fn field(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1 << 10)
}

/// Images that fit into `budget` at once, if `images` of them took `grown` bytes and one takes at
/// least `least`.
pub(crate) fn fitting(images: usize, grown: u64, least: u64, budget: u64) -> usize {
    let each = (grown / images.max(1) as u64).max(least).max(1);
    usize::try_from(budget / each).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_reports_is_read() {
        let text = "VmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\nThreads:\t3\n";
        assert_eq!(field(text, "VmRSS:"), Some(1 << 20));
        assert_eq!(field(text, "Threads:"), None);
        assert_eq!(field(text, "VmSwap:"), None);
        assert!(resident().is_some_and(|bytes| bytes > 0));
        assert!(budget().is_some_and(|bytes| bytes > 0));
    }

    /// Writes files with these names and contents below `root`.
    fn write(root: &Path, files: &[(&str, &str)]) {
        for (name, text) in files {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    #[test]
    fn the_tightest_control_group_limits_the_memory() {
        let mount = tempfile::tempdir().unwrap();
        let own = "0::/pod/worker\n";
        assert_eq!(ControlGroups::of(mount.path(), own).limit(), None);
        write(
            mount.path(),
            &[
                ("pod/memory.max", "4096000\n"),
                ("pod/memory.current", "4000000\n"),
                (
                    "pod/memory.stat",
                    "anon 7\ninactive_file 1000000\nactive_file 9\n",
                ),
                ("pod/worker/memory.max", "max\n"),
                ("pod/worker/memory.current", "3000\n"),
                ("memory.stat", "inactive_file 5\n"),
            ],
        );
        let groups = ControlGroups::of(mount.path(), own);
        assert_eq!(
            (groups.limit(), groups.left()),
            (Some(4_096_000), Some(1_096_000))
        );
        write(
            mount.path(),
            &[
                ("pod/worker/memory.max", "5000\n"),
                ("pod/worker/memory.current", "6000\n"),
            ],
        );
        assert_eq!((groups.limit(), groups.left()), (Some(5000), Some(0)));
    }

    #[test]
    fn control_groups_of_the_first_version_limit_it_too() {
        let mount = tempfile::tempdir().unwrap();
        let own = "12:cpu,cpuacct:/docker/abc\n5:memory:/docker/abc\n1:name=systemd:/docker/abc\n0::/docker/abc\n";
        // As seen in a container: its own group is the mount.
        write(
            mount.path(),
            &[
                ("memory/memory.limit_in_bytes", "2097152\n"),
                ("memory/memory.usage_in_bytes", "1048576\n"),
                (
                    "memory/memory.stat",
                    "inactive_file 1\ntotal_inactive_file 48576\n",
                ),
                ("cpu,cpuacct/docker/abc/memory.limit_in_bytes", "1\n"),
            ],
        );
        let groups = ControlGroups::of(mount.path(), own);
        assert_eq!(
            (groups.limit(), groups.left()),
            (Some(2_097_152), Some(1_097_152))
        );
        write(
            mount.path(),
            &[("memory/memory.limit_in_bytes", "9223372036854771712\n")],
        );
        assert_eq!((groups.limit(), groups.left()), (None, None));
    }

    #[test]
    fn larger_batches_are_estimated_from_a_small_one() {
        assert_eq!(fitting(16, 1600, 10, 1000), 10);
        assert_eq!(fitting(16, 0, 10, 1000), 100);
        assert_eq!(fitting(0, 0, 0, 1000), 1000);
    }
}
