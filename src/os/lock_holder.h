/* Who holds a folder's lock, for messages. */
#ifndef EVEN_OS_LOCK_HOLDER_H
#define EVEN_OS_LOCK_HOLDER_H

#include "base/text.h"

/* Adds "host node4: process 1234 (evenstep run train.py), which began at 2026-12-02 10:15:00" (its command, at most 200
 * bytes of it; local time): the process of this host that has taken the lock of even_folder_lock, by /proc/locks
 * (proc(5)). Adds nothing, and is no error, where that does not tell it: the process is another host's, or of a
 * container that is not seen from here; the file system numbers files in two ways (btrfs's subvolumes, some of
 * overlayfs). Any thread. */
void even_lock_add_holder(const char *folder, even_text *out);

#endif
