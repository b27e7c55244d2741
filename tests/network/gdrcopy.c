/* A stand-in for GDRCopy (libgdrapi.so.2), which NVSHMEM's UCX transport needs for signals. If the symmetric heap is host
   memory, its CPU mapping is the memory itself; if it is GPU memory, nothing is mapped, and gpu_heap.c prevents any use
   of the mapping.

   cc -shared -fPIC -o libgdrapi.so.2 gdrcopy.c */
#include <stdint.h>
#include <stdlib.h>

struct handle {
  unsigned long address;
};
struct info { /* first layout in version 2, of the function without a suffix */
  uint64_t address, bytes;
  uint32_t page_bytes;
  uint64_t cycles;
  uint32_t cycles_a_ms;
  unsigned is_mapped : 1;
  unsigned is_write_combining : 1;
};

void *gdr_open(void) { return malloc(1); }
int gdr_close(void *gdr) {
  free(gdr);
  return 0;
}
int gdr_pin_buffer(void *gdr, unsigned long address, size_t bytes, uint64_t token, uint32_t space, struct handle *handle) {
  (void)gdr, (void)bytes, (void)token, (void)space;
  handle->address = address;
  return 0;
}
int gdr_unpin_buffer(void *gdr, struct handle handle) {
  (void)gdr, (void)handle;
  return 0;
}
int gdr_map(void *gdr, struct handle handle, void **address, size_t bytes) {
  (void)gdr, (void)bytes;
  *address = (void *)handle.address;
  return 0;
}
int gdr_unmap(void *gdr, struct handle handle, void *address, size_t bytes) {
  (void)gdr, (void)handle, (void)address, (void)bytes;
  return 0;
}
int gdr_get_info(void *gdr, struct handle handle, struct info *info) {
  (void)gdr;
  *info = (struct info){.address = handle.address, .page_bytes = 65536, .cycles_a_ms = 1, .is_mapped = 1};
  return 0;
}
/* NVSHMEM reads a word only to complete earlier writes: here they are complete */
int gdr_copy_from_mapping(struct handle handle, void *to, const void *from, size_t bytes) {
  (void)handle, (void)to, (void)from, (void)bytes;
  return 0;
}
int gdr_copy_to_mapping(struct handle handle, void *to, const void *from, size_t bytes) {
  (void)handle, (void)to, (void)from, (void)bytes;
  return 1; /* NVSHMEM does not call it */
}
void gdr_runtime_get_version(int *major, int *minor) { *major = 2, *minor = 4; }
int gdr_driver_get_version(void *gdr, int *major, int *minor) {
  (void)gdr;
  gdr_runtime_get_version(major, minor);
  return 0;
}
