// Reads the build-id that the linker left in the loaded file.
#include "braid/core/build.h"

#include <elf.h>
#include <fmt/format.h>
#include <link.h>

#include <cstdint>
#include <cstring>

namespace braid {
namespace {

constexpr int kShown = 8;  // bytes of the build-id

struct Search {
  std::uintptr_t address;  // within the wanted file
  std::string id;
};

std::string id_in_notes(const char* notes, std::size_t size) {
  const auto aligned = [](std::size_t bytes) { return (bytes + 3) / 4 * 4; };
  for (std::size_t at = 0; at + sizeof(ElfW(Nhdr)) <= size;) {
    ElfW(Nhdr) note;
    std::memcpy(&note, notes + at, sizeof note);
    const char* name = notes + at + sizeof note;
    if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 && std::memcmp(name, "GNU", 4) == 0) {
      std::string id;
      for (int i = 0; i < kShown && i < static_cast<int>(note.n_descsz); ++i)
        id += fmt::format("{:02x}", static_cast<unsigned char>(name[4 + i]));
      return id;
    }
    at += sizeof note + aligned(note.n_namesz) + aligned(note.n_descsz);
  }
  return "";
}

int look_into(dl_phdr_info* file, std::size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  bool is_wanted = false;
  std::string id;
  for (int i = 0; i < file->dlpi_phnum; ++i) {
    const auto& part = file->dlpi_phdr[i];
    const auto begin = file->dlpi_addr + part.p_vaddr;
    if (part.p_type == PT_LOAD && search.address >= begin && search.address < begin + part.p_memsz)
      is_wanted = true;
    if (part.p_type == PT_NOTE && id.empty())
      id = id_in_notes(reinterpret_cast<const char*>(begin), part.p_filesz);
  }
  if (is_wanted) search.id = id;
  return is_wanted ? 1 : 0;
}

}  // namespace

std::string build_text() {
  Search search{reinterpret_cast<std::uintptr_t>(&look_into), ""};
  dl_iterate_phdr(look_into, &search);
  return fmt::format("{} (build {})", BRAID_VERSION, search.id.empty() ? "unknown" : search.id);
}

}  // namespace braid
