/* A layer between a process and its files (LD_PRELOAD) that counts every operation below a folder, kills the process at
 * one of them, and writes a log of what was done. Python, Rust and C++ libraries all pass through it.
 *
 * A write at which the process is killed is half done. The log says what a power cut would lose: files that were
 * written and not forced to the disk. Lines are NUL-separated fields: W path size (what it keeps), F path, R old new, X one other, D path.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static long count, fatal;
static int log_file = -1, can_exchange = 1;

/* Start to count operations below `folder`; the process dies at number `at` (0: never). Without `exchange` two names
 * cannot be swapped in one step, as on systems other than Linux. */
void crash_arm(const char *folder, long at, const char *log_path, int exchange) {
    can_exchange = exchange;
    count = 0;
    fatal = at;
    log_file = (int)syscall(SYS_openat, AT_FDCWD, log_path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600);
    strncpy(root, folder, PATH_MAX - 1);
}

long crash_count(void) { return count; }

/* The absolute path of a name, or "" where it is not below the folder. */
static const char *below(int folder, const char *name, char *buffer) {
    if (!root[0] || !name) return "";
    size_t length = 0;
    if (name[0] != '/') {
        char link[64];
        ssize_t size;
        if (folder == AT_FDCWD) strcpy(link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        size = readlink(link, buffer, PATH_MAX - 2);
        if (size < 0) return "";
        length = (size_t)size;
        buffer[length++] = '/';
    }
    snprintf(buffer + length, PATH_MAX - length, "%s", name);
    size_t depth = strlen(root);
    return !strncmp(buffer, root, depth) && (buffer[depth] == '/' || !buffer[depth]) ? buffer : "";
}

static const char *below_number(int number, char *buffer) {
    char link[64], path[PATH_MAX];
    if (!root[0]) return "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", number);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    if (size <= 0 || path[0] != '/') return "";
    path[size] = 0;
    return below(AT_FDCWD, path, buffer);
}

static void note(char kind, const char *one, const char *other) {
    if (log_file < 0) return;
    char line[2 * PATH_MAX + 8];
    int size = snprintf(line, sizeof line, "%c%c%s%c%s\n", kind, 0, one, 0, other);
    syscall(SYS_write, log_file, line, (size_t)size);
}

static int is_fatal(void) { return ++count == fatal; }
static void die(void) { syscall(SYS_kill, getpid(), SIGKILL); }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define BEFORE(path) if ((path)[0] && is_fatal()) die()

static void opened(const char *path, int flags) {
    if (!path[0] || (flags & O_ACCMODE) == O_RDONLY) return;
    BEFORE(path);
    char size[32] = "0";
    struct stat before;
    if (!(flags & O_TRUNC) && stat(path, &before) == 0) snprintf(size, sizeof size, "%lld", (long long)before.st_size);
    if (flags & (O_CREAT | O_TRUNC)) note('W', path, size);
}

#define OPEN(name)                                                                 \
    int name(const char *path, int flags, ...) {                                   \
        char buffer[PATH_MAX];                                                     \
        va_list rest;                                                              \
        va_start(rest, flags);                                                     \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;    \
        va_end(rest);                                                              \
        opened(below(AT_FDCWD, path, buffer), flags);                              \
        return REAL(name)(path, flags, mode);                                      \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                               \
    int name(int folder, const char *path, int flags, ...) {                       \
        char buffer[PATH_MAX];                                                     \
        va_list rest;                                                              \
        va_start(rest, flags);                                                     \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;    \
        va_end(rest);                                                              \
        opened(below(folder, path, buffer), flags);                                \
        return REAL(name)(folder, path, flags, mode);                              \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                                \
    FILE *name(const char *path, const char *mode) {                               \
        char buffer[PATH_MAX];                                                     \
        int writes = strpbrk(mode, "wa+") != NULL, empties = strchr(mode, 'w') != NULL;                                 \
        opened(below(AT_FDCWD, path, buffer), writes ? O_WRONLY | O_CREAT | (empties ? O_TRUNC : 0) : O_RDONLY); \
        return REAL(name)(path, mode);                                             \
    }
FOPEN(fopen)
FOPEN(fopen64)

ssize_t write(int number, const void *data, size_t size) {
    char buffer[PATH_MAX];
    const char *path = below_number(number, buffer);
    if (path[0]) {
        note('W', path, "");
        if (is_fatal()) { syscall(SYS_write, number, data, size / 2); die(); }
    }
    return REAL(write)(number, data, size);
}

#define PWRITE(name)                                                               \
    ssize_t name(int number, const void *data, size_t size, off_t at) {            \
        char buffer[PATH_MAX];                                                     \
        const char *path = below_number(number, buffer);                           \
        if (path[0]) {                                                             \
            note('W', path, "");                                                   \
            if (is_fatal()) { syscall(SYS_pwrite64, number, data, size / 2, at); die(); } \
        }                                                                          \
        return REAL(name)(number, data, size, at);                                 \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

ssize_t writev(int number, const struct iovec *parts, int num_parts) {
    char buffer[PATH_MAX];
    const char *path = below_number(number, buffer);
    if (path[0]) { note('W', path, ""); BEFORE(path); }
    return REAL(writev)(number, parts, num_parts);
}

#define SENDFILE(name)                                                             \
    ssize_t name(int to, int from, off_t *at, size_t size) {                       \
        char buffer[PATH_MAX];                                                     \
        const char *path = below_number(to, buffer);                               \
        if (path[0]) { note('W', path, ""); BEFORE(path); }                        \
        return REAL(name)(to, from, at, size);                                     \
    }
SENDFILE(sendfile)
SENDFILE(sendfile64)

#define TRUNCATE(name)                                                             \
    int name(int number, off_t size) {                                             \
        char buffer[PATH_MAX];                                                     \
        const char *path = below_number(number, buffer);                           \
        if (path[0]) { note('W', path, ""); BEFORE(path); }                        \
        return REAL(name)(number, size);                                           \
    }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define FORCE(name)                                                                \
    int name(int number) {                                                         \
        char buffer[PATH_MAX];                                                     \
        const char *path = below_number(number, buffer);                           \
        BEFORE(path);                                                              \
        int result = REAL(name)(number);                                           \
        if (path[0]) note('F', path, "");                                          \
        return result;                                                             \
    }
FORCE(fsync)
FORCE(fdatasync)

static int renamed(int folder, const char *old, int new_folder, const char *new, unsigned flags) {
    char buffer[PATH_MAX], other[PATH_MAX];
    const char *from = below(folder, old, buffer), *to = below(new_folder, new, other);
    if (to[0] && flags & 2 && !can_exchange) { errno = EINVAL; return -1; }
    BEFORE(to);
    long result = syscall(SYS_renameat2, folder, old, new_folder, new, flags);
    if (result == 0 && to[0]) note(flags & 2 ? 'X' : 'R', from, to); /* RENAME_EXCHANGE */
    return (int)result;
}
int rename(const char *old, const char *new) { return renamed(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int folder, const char *old, int new_folder, const char *new) {
    return renamed(folder, old, new_folder, new, 0);
}
int renameat2(int folder, const char *old, int new_folder, const char *new, unsigned flags) {
    return renamed(folder, old, new_folder, new, flags);
}

static void removed(const char *path) {
    BEFORE(path);
    if (path[0]) note('D', path, "");
}
int unlink(const char *path) {
    char buffer[PATH_MAX];
    removed(below(AT_FDCWD, path, buffer));
    return REAL(unlink)(path);
}
int unlinkat(int folder, const char *path, int flags) {
    char buffer[PATH_MAX];
    removed(below(folder, path, buffer));
    return REAL(unlinkat)(folder, path, flags);
}
int rmdir(const char *path) {
    char buffer[PATH_MAX];
    removed(below(AT_FDCWD, path, buffer));
    return REAL(rmdir)(path);
}
int mkdir(const char *path, mode_t mode) {
    char buffer[PATH_MAX];
    BEFORE(below(AT_FDCWD, path, buffer));
    return REAL(mkdir)(path, mode);
}
int mkdirat(int folder, const char *path, mode_t mode) {
    char buffer[PATH_MAX];
    BEFORE(below(folder, path, buffer));
    return REAL(mkdirat)(folder, path, mode);
}
int symlink(const char *target, const char *path) {
    char buffer[PATH_MAX];
    BEFORE(below(AT_FDCWD, path, buffer));
    return REAL(symlink)(target, path);
}
